// What the charts show: tokens held and attention retained by layer and head, and bytes by token.

class Figures {
  constructor(data, choose) {
    this.data = data;
    const cell = (layer, head) => choose({ layer: String(layer), head: String(head) });
    this.held = new HeatMap(document.getElementById("held-map"), "Tokens held now", cell);
    this.retained = new HeatMap(document.getElementById("retained-map"), "Attention retained", cell);
    this.memory = new MemoryChart(document.getElementById("memory"), data, (step) => choose({ step }));
    this.table = document.getElementById("map-table");
    this.folded = this.table.closest("details");
    this.folded.addEventListener("toggle", () => this.fillTable());
  }

  show(state) {
    const { data } = this;
    this.state = state;
    this.runs = chosenRuns(data, state);
    const held = this.grid((run, cell) => heldBy(run, cell, state.step));
    const most = Math.max(1, ...held.flat());
    this.held.show(held, this.texts(held, (value, layer) => `${number(Math.round(value))} tokens (${this.budget(layer)})`),
      most, number(Math.round(most)), state);
    const retained = this.grid((run, cell) => (
      run.retained ? run.retained[Math.floor(cell / data.heads)][cell % data.heads] : null));
    const measured = retained.flat().some((value) => value !== null);
    this.retained.box.hidden = !measured;
    if (measured) this.retained.show(retained, this.texts(retained, percent), 1, "100 %", state);
    this.memory.show(state.step);
    Object.assign(this, { heldValues: held, retainedValues: measured ? retained : null });
    this.tell(measured);
    this.fillTable();
  }

  /** [layer][head] of the mean of `value(run, cell)` over the chosen runs. */
  grid(value) {
    const { layers, heads } = this.data;
    return Array.from({ length: layers }, (_, layer) => Array.from({ length: heads }, (__, head) => {
      const values = this.runs.map((run) => value(run, layer * heads + head)).filter((one) => one !== null);
      return values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null;
    }));
  }

  texts(values, say) {
    return values.map((row, layer) => row.map((value, head) => {
      const own = this.data.sliding[layer] === null ? "" : ", a window of its own";
      return `Layer ${layer}${own}, head ${head}: ${value === null ? "not measured" : say(value, layer)}`;
    }));
  }

  /** What a head of a layer may hold. */
  budget(layer) {
    if (this.runs.length > 1) return "mean of the policies";
    const budget = this.runs[0].budgets[layer];
    return budget === null ? "no limit" : `budget ${number(budget)}`;
  }

  tell(measured) {
    const own = this.data.sliding.filter((window) => window !== null).length;
    document.getElementById("map-told").textContent = [
      `Layers go across, KV heads down, with ${this.runs.map((run) => run.label).join(", ")}.`,
      measured && "Retained is the share of the attention the full cache pays while it answers that lies on tokens still held then.",
      own && `${plural(own, "layer")} keep${own === 1 ? "s" : ""} a window of ${own === 1 ? "its" : "their"} own.`,
      "Click a field to choose its layer and head.",
    ].filter(Boolean).join(" ");
  }

  fillTable() {
    if (!this.folded.open) return;
    const { layers, heads, sliding } = this.data;
    const retained = this.retainedValues;
    const table = element("table", "");
    const numbered = (text) => Array.from({ length: heads }, (_, head) => `${text}, head ${head}`);
    const first = table.createTHead().insertRow();
    for (const title of ["layer", "budget", ...numbered("held"), ...(retained ? numbered("retained") : [])]) {
      const cell = element("th", "", title);
      cell.scope = "col";
      first.append(cell);
    }
    const body = table.createTBody();
    for (let layer = 0; layer < layers; layer += 1) {
      const values = [
        `${layer}${sliding[layer] === null ? "" : " (window)"}`,
        this.budget(layer).replace("budget ", ""),
        ...this.heldValues[layer].map((value) => number(Math.round(value))),
        ...(retained ? retained[layer].map((value) => (value === null ? "-" : percent(value))) : []),
      ];
      const row = body.insertRow();
      for (const value of values) row.insertCell().textContent = value;
    }
    this.table.replaceChildren(table);
  }
}
