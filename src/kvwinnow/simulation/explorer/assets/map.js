// A map of layers and heads in SVG: a control that one walks through by keyboard, which no chart of a library is. Its
// colours come from the style sheet, so that light and dark need no redrawing.

function svgElement(name, attributes = {}, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Round numbers from `least` to `most`, `count` of them or fewer. */
function ticks(least, most, count) {
  const raw = (most - least) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const made = [];
  for (let value = Math.ceil(least / step) * step; value <= most + step * 1e-9; value += step) made.push(value);
  return made;
}

/** Call `then` whenever the width of `box` changes. Its height changes with every line that is said below a figure. */
function onWidth(box, then) {
  let width = box.clientWidth;
  new ResizeObserver(() => {
    if (box.clientWidth === width) return;
    width = box.clientWidth;
    then();
  }).observe(box);
}

/** Columns of layers, rows of heads; a field is reached by pointer or by arrow keys, and chosen by click or Enter. */
class HeatMap {
  constructor(box, title, onChoose) {
    this.box = box;
    this.onChoose = onChoose;
    this.at = [0, 0];
    this.title = element("p", "map-title");
    this.title.append(element("span", "", title), (this.least = element("span", "end", "0")), element("span", "scale"),
      (this.most = element("span", "end")));
    this.svg = svgElement("svg", { tabindex: 0, role: "application", "aria-roledescription": "map", "aria-label": `${title}: layers and heads` });
    this.readout = element("p", "readout");
    this.readout.setAttribute("aria-live", "polite");
    box.append(this.title, this.svg, this.readout);
    this.listen();
    onWidth(box, () => this.draw());
  }

  /** `values[layer][head]`, null for none; `texts` likewise; `most` is the strongest shade; `chosen` is the state. */
  show(values, texts, most, mostText, chosen) {
    Object.assign(this, { values, texts, largest: most, chosen });
    this.most.textContent = mostText;
    this.draw();
  }

  draw() {
    if (!this.values) return;
    const [layers, heads] = [this.values.length, this.values[0].length];
    const width = Math.max(120, this.box.clientWidth);
    const left = 30;
    const across = (width - left - 2) / layers;
    const down = Math.max(7, Math.min(24, 230 / heads));
    const height = heads * down + 20;
    const parts = [];
    for (let layer = 0; layer < layers; layer += 1) {
      for (let head = 0; head < heads; head += 1) {
        const value = this.values[layer][head];
        parts.push(svgElement("rect", {
          class: value === null ? "cell nothing" : "cell",
          x: left + layer * across, y: head * down + 1, width: Math.max(1, across - 1), height: Math.max(1, down - 1),
          "fill-opacity": value === null ? 1 : Math.max(0, Math.min(1, value / this.largest)),
          "data-layer": layer, "data-head": head,
        }));
      }
    }
    const every = Math.max(1, Math.ceil(heads / 8));
    for (let head = 0; head < heads; head += every) {
      parts.push(svgElement("text", { x: left - 6, y: (head + 0.5) * down + 5, "text-anchor": "end" }, head));
    }
    const each = ticks(0, layers, Math.min(layers, Math.floor(width / 55)))[1] || 1;
    for (let layer = 0; layer < layers; layer += Math.max(1, Math.round(each))) {
      parts.push(svgElement("text", { x: left + (layer + 0.5) * across, y: height - 5, "text-anchor": "middle" }, layer));
    }
    parts.push(this.frame("chosen", left, across, down, this.chosen.layer, this.chosen.head));
    parts.push(this.frame("cursor", left, across, down, ...this.at));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
    this.svg.replaceChildren(...parts.filter(Boolean));
  }

  /** A frame around a layer, a head or a field; none around everything. */
  frame(name, left, across, down, layer, head) {
    if (layer === "all" && head === "all") return null;
    const [layers, heads] = [this.values.length, this.values[0].length];
    const column = layer === "all" ? 0 : Number(layer);
    const line = head === "all" ? 0 : Number(head);
    return svgElement("rect", {
      class: name, x: left + column * across - 1, y: line * down,
      width: (layer === "all" ? layers : 1) * across + 1, height: (head === "all" ? heads : 1) * down + 1,
    });
  }

  listen() {
    const field = (event) => {
      const { layer, head } = event.target.dataset ?? {};
      return layer === undefined ? null : [Number(layer), Number(head)];
    };
    this.svg.addEventListener("pointerover", (event) => this.tell(field(event)));
    this.svg.addEventListener("pointerleave", () => this.tell(null));
    this.svg.addEventListener("focus", () => this.tell(this.at));
    this.svg.addEventListener("blur", () => this.tell(null));
    this.svg.addEventListener("click", (event) => {
      const at = field(event);
      if (at) this.onChoose(...at);
    });
    this.svg.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      if (event.key in moves) {
        const [dx, dy] = moves[event.key];
        const clamp = (value, most) => Math.max(0, Math.min(most - 1, value));
        this.at = [clamp(this.at[0] + dx, this.values.length), clamp(this.at[1] + dy, this.values[0].length)];
        this.draw();
        this.tell(this.at);
      } else if (event.key === "Enter" || event.key === " ") {
        this.onChoose(...this.at);
      } else {
        return;
      }
      event.preventDefault();
    });
  }

  tell(at) {
    this.readout.textContent = at ? this.texts[at[0]][at[1]] : "";
  }
}
