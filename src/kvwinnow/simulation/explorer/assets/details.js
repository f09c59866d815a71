// What is told of the token pointed at: text, position, score, and which KV heads hold it.

const VISIBLE = { " ": "·", "\n": "↵", "\t": "→", "\u00a0": "⍽" };

class Details {
  constructor(data, reader) {
    this.data = data;
    this.reader = reader;
    this.tip = document.getElementById("tip");
  }

  hide() {
    this.tip.hidden = true;
    this.of?.removeAttribute("aria-describedby");
  }

  show(index, node, state) {
    this.hide();
    this.of = node;
    this.tip.replaceChildren(...this.lines(index, state));
    this.tip.hidden = false;
    node.setAttribute("aria-describedby", "tip");
    this.place(node);
  }

  /** Stay beside the token while the page scrolls, as long as it is in sight. */
  follow() {
    if (this.tip.hidden) return;
    const { top, bottom } = this.of.getBoundingClientRect();
    if (bottom < 0 || top > window.innerHeight) this.hide();
    else this.place(this.of);
  }

  /** Under the token, or above it where there is more room; a phone has it at the bottom by its style. */
  place(node) {
    const [first] = node.getClientRects();
    if (!first) return;
    const { width, height } = this.tip.getBoundingClientRect();
    const left = Math.max(8, Math.min(first.left, document.documentElement.clientWidth - width - 8));
    const below = first.bottom + 8;
    const top = below + height < window.innerHeight - 8 ? below : Math.max(8, first.top - height - 8);
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${top}px`;
  }

  lines(index, state) {
    const { data } = this;
    const runs = chosenRuns(data, state);
    const cells = chosenCells(data, state);
    const text = [...this.reader.textOf(index)].map((letter) => VISIBLE[letter] ?? letter).join("");
    const part = this.reader.nodes[index].classList.contains("p") ? " (a part of this character)" : "";
    const where = index < data.prompt ? `of the prompt's ${number(data.prompt)}` : "in the answer";
    const made = [
      element("div", "token", `${text}${part}`),
      element("div", "place", `position ${number(index)} ${where}`),
    ];
    const list = document.createElement("dl");
    made.push(list);
    for (const run of runs) {
      const many = runs.length > 1;
      if (index >= data.prompt + stepOf(run, state.step)) {
        row(list, many ? run.label : "kept", "chosen, and not read in yet");
        continue;
      }
      row(list, many ? run.label : "kept", this.kept(run, cells, index, state));
      if (many) continue;
      const lost = this.lost(run, cells, index, state);
      if (lost) row(list, "evicted", lost);
      row(list, "score", this.score(run, cells, index));
      if (cells.length > 1) {
        row(list, "layer: heads", this.where(run, index, state), "where");
        made.push(this.grid(run, cells, index, state));
      }
    }
    return made;
  }

  kept(run, cells, index, state) {
    const count = cells.filter((cell) => fate(this.data, run, cell, index, state.step).kept).length;
    if (cells.length === 1) return count ? "yes" : "no";
    return `by ${count} of ${plural(cells.length, "KV head")}`;
  }

  /** When the chosen heads lost it, the steps with the most heads first. */
  lost(run, cells, index, state) {
    const steps = new Map();
    for (const cell of cells) {
      const { kept, at } = fate(this.data, run, cell, index, state.step);
      if (!kept) steps.set(at, (steps.get(at) ?? 0) + 1);
    }
    const times = [...steps].sort((a, b) => b[1] - a[1] || a[0] - b[0]);
    const told = times.slice(0, 3).map(([at, heads]) => {
      const when = at === 0 ? "before the answer" : `at step ${at}`;
      return cells.length === 1 ? when : `${when} by ${number(heads)}`;
    });
    if (times.length > 3) told.push(`at ${times.length - 3} other steps by others`);
    return told.join(", ");
  }

  /** One head's score, or what those of several come to. */
  score(run, cells, index) {
    const scores = cells.map((cell) => run.scores[cell * run.tokens + index]);
    if (scores.length === 1) return scoreText(scores[0]);
    const given = scores.filter((score) => Number.isFinite(score)).sort((a, b) => a - b);
    if (!given.length) return scoreText(scores.some((score) => score === Infinity) ? Infinity : scores[0]);
    const middle = given[(given.length - 1) >> 1];
    return `${scoreText(middle)} median, ${scoreText(given[0])} to ${scoreText(given[given.length - 1])}`;
  }

  /** Layers and their heads that hold it; neighbouring layers that agree in one. */
  where(run, index, state) {
    const { layers, heads } = this.data;
    const groups = [];
    for (let layer = 0; layer < layers; layer += 1) {
      const holding = [];
      for (let head = 0; head < heads; head += 1) {
        if (fate(this.data, run, layer * heads + head, index, state.step).kept) holding.push(head);
      }
      const told = holding.length === heads ? "all" : holding.join(" ");
      const last = groups[groups.length - 1];
      if (last && last.told === told) last.end = layer;
      else groups.push({ begin: layer, end: layer, told });
    }
    const kept = groups.filter((group) => group.told !== "");
    if (!kept.length) return "none";
    const names = kept.map(({ begin, end, told }) => `${begin === end ? begin : `${begin}–${end}`}: ${told}`);
    return names.join(" · ");
  }

  /** Every layer a column, every head a row: filled where the token is held. */
  grid(run, cells, index, state) {
    const { layers, heads } = this.data;
    const size = Math.max(3, Math.min(11, Math.floor(390 / layers)));
    const svg = svgElement("svg", { width: layers * size + 2, height: heads * size + 2, "aria-hidden": "true" });
    const chosen = new Set(cells);
    const some = cells.length < layers * heads;
    for (let cell = 0; cell < layers * heads; cell += 1) {
      const kept = fate(this.data, run, cell, index, state.step).kept;
      const names = [kept && "kept", some && chosen.has(cell) && "chosen"].filter(Boolean).join(" ");
      svg.append(svgElement("rect", {
        x: Math.floor(cell / heads) * size + 1.5,
        y: (cell % heads) * size + 1.5,
        width: size - 1.5,
        height: size - 1.5,
        class: names,
      }));
    }
    return svg;
  }
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function row(list, term, text, className = "") {
  list.append(element("dt", "", term), element("dd", className, text));
}
