// Two small charts in SVG: a map of layers and heads, and lines over tokens. They take their colours from the style
// sheet, so that light and dark need no redrawing. (plotly.js takes over a second to start.)

function svgElement(name, attributes = {}, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Round numbers from 0 to at least `most`, about `count` of them. */
function ticks(least, most, count) {
  const raw = (most - least) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const made = [];
  for (let value = Math.ceil(least / step) * step; value <= most + step * 1e-9; value += step) made.push(value);
  return made;
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
    new ResizeObserver(() => this.draw()).observe(box);
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

/** Lines over a common axis; the current place is marked, and a click goes to another. */
class LineChart {
  constructor(box, { xTitle, yTitle, onChoose }) {
    Object.assign(this, { box, xTitle, yTitle, onChoose });
    this.key = element("p", "key");
    this.svg = svgElement("svg", { role: "img" });
    this.readout = element("p", "readout");
    box.append(this.key, this.svg, this.readout);
    this.svg.addEventListener("pointermove", (event) => this.tell(this.place(event)));
    this.svg.addEventListener("pointerleave", () => this.tell(this.now));
    this.svg.addEventListener("click", (event) => this.onChoose(this.place(event)));
    new ResizeObserver(() => this.draw()).observe(box);
  }

  /** `lines`: {name, colour, dash, values}, the first value at x = `start`; `label(value)` says one. */
  set(lines, start, label) {
    Object.assign(this, { lines, start, label });
    this.key.replaceChildren(...lines.map((line) => {
      const item = element("span", "");
      const sample = svgElement("svg", { width: 26, height: 10, "aria-hidden": "true" });
      sample.append(svgElement("path", { d: "M0 5H26", style: `stroke: ${line.colour}`, "stroke-dasharray": line.dash }));
      item.append(sample, line.name);
      return item;
    }));
  }

  show(now) {
    this.now = now;
    this.draw();
    this.tell(now);
  }

  get steps() { return Math.max(...this.lines.map((line) => line.values.length)) - 1; }

  x(step) { return this.left + (this.steps ? step / this.steps : 0.5) * (this.width - this.left - 14); }

  place(event) {
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - this.left) / (this.width - this.left - 14);
    return Math.max(0, Math.min(this.steps, Math.round(share * this.steps)));
  }

  draw() {
    if (!this.lines || this.now === undefined) return;
    this.width = Math.max(160, this.box.clientWidth);
    this.left = 52;
    const [height, top, bottom] = [230, 12, 188];
    const most = Math.max(...this.lines.flatMap((line) => line.values)) * 1.05;
    const y = (value) => bottom - (value / most) * (bottom - top);
    const parts = [];
    for (const value of ticks(0, most, 5)) {
      parts.push(svgElement("path", { class: "rule", d: `M${this.left} ${y(value)}H${this.width - 14}` }));
      parts.push(svgElement("text", { x: this.left - 7, y: y(value) + 4, "text-anchor": "end" }, number(value)));
    }
    for (const value of this.steps ? ticks(this.start, this.start + this.steps, this.width / 95) : [this.start]) {
      if (!Number.isInteger(value)) continue;
      parts.push(svgElement("text", { x: this.x(value - this.start), y: bottom + 18, "text-anchor": "middle" }, number(value)));
    }
    parts.push(svgElement("text", { x: (this.left + this.width) / 2, y: height - 4, "text-anchor": "middle" }, this.xTitle));
    parts.push(svgElement("text", { transform: `translate(12 ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, this.yTitle));
    parts.push(svgElement("path", { class: "now", d: `M${this.x(this.now)} ${top}V${bottom}` }));
    for (const line of this.lines) {
      const d = line.values.map((value, step) => `${step ? "L" : "M"}${this.x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
      parts.push(svgElement("path", { class: "line", d, style: `stroke: ${line.colour}`, "stroke-dasharray": line.dash }));
      const at = Math.min(this.now, line.values.length - 1);
      parts.push(svgElement("circle", { cx: this.x(at), cy: y(line.values[at]), r: 3.5, style: `fill: ${line.colour}` }));
    }
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("height", height);
    this.svg.replaceChildren(...parts);
  }

  tell(step) {
    const values = this.lines.map((line) => (
      `${line.name} ${this.label(line.values[Math.min(step, line.values.length - 1)])}`));
    this.readout.textContent = `${number(this.start + step)} tokens: ${values.join(", ")}`;
    this.svg.setAttribute("aria-label", `Memory against tokens. ${this.readout.textContent}`);
  }
}
