// Puts the parts together: the choice, the controls that change it, and what follows.

const $ = (id) => document.getElementById(id);

class Explorer {
  constructor(data) {
    this.data = data;
    this.state = { policy: data.runs.length > 1 ? "1" : "0", layer: "all", head: "all", step: 0 };
    this.reader = new Reader(data, (index, node) => this.point(index, node));
    this.details = new Details(data, this.reader);
    this.figures = new Figures(data, (change) => this.choose(change));
    this.fillControls();
    this.fillStrips();
    this.fillAnswers();
    this.listen();
    this.show();
  }

  /** Change the choice; all that depends on it is drawn once, before the next frame, and then `after` runs. */
  choose(change, after) {
    Object.assign(this.state, change);
    for (const name of ["policy", "layer", "head"]) $(name).value = this.state[name];
    $("step").value = this.state.step;
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.show();
      after?.();
    });
  }

  show() {
    const { state } = this;
    const told = this.reader.show(state);
    this.tell(told);
    this.showStrips();
    this.showAnswers();
    this.figures.show(state);
    if (this.pointed !== null && this.pointed !== undefined) this.point(this.pointed, this.reader.nodes[this.pointed]);
  }

  point(index, node) {
    this.pointed = index;
    if (index === null || !node || node.hidden) this.details.hide();
    else this.details.show(index, node, this.state);
  }

  // -- controls ------------------------------------------------------------------------------------

  fillControls() {
    const { data } = this;
    const several = data.runs.length > 2 ? [["all", "all but the full cache"]] : [];
    fill($("policy"), [...data.runs.map((run) => [String(run.number), run.label]), ...several]);
    const own = data.sliding.some((window) => window !== null);
    const following = data.sliding.some((window) => window === null);
    const name = (layer) => `${layer}${data.sliding[layer] === null ? "" : ` (window ${number(data.sliding[layer])})`}`;
    const layers = Array.from({ length: data.layers }, (_, layer) => [String(layer), name(layer)]);
    fill($("layer"), [["all", own && following ? "all that follow the policy" : "all"], ...layers]);
    fill($("head"), [["all", "all"], ...Array.from({ length: data.heads }, (_, head) => [String(head), String(head)])]);
    $("policy").value = this.state.policy;
  }

  listen() {
    $("controls").addEventListener("submit", (event) => event.preventDefault());
    for (const name of ["policy", "layer", "head"]) {
      $(name).addEventListener("change", (event) => this.choose({ [name]: event.target.value }));
    }
    $("step").addEventListener("input", (event) => {
      this.play(false);
      this.choose({ step: Number(event.target.value) });
    });
    $("play").addEventListener("click", () => this.play(!this.timer));
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.showStrips());
    window.addEventListener("scroll", () => this.details.follow(), { passive: true });
    new ResizeObserver(() => this.showStrips()).observe($("strips"));
  }

  /** Go through the steps, from the start if they are at their end. */
  play(on) {
    clearInterval(this.timer);
    this.timer = null;
    if (on) {
      if (this.state.step >= this.data.steps) this.choose({ step: 0 });
      this.timer = setInterval(() => {
        if (this.state.step >= this.data.steps) this.play(false);
        else this.choose({ step: this.state.step + 1 }, () => this.reader.showNewest());
      }, 300);
    }
    $("play").textContent = on ? "❚❚" : "▶";
    $("play").setAttribute("aria-label", on ? "Pause" : "Play the decode steps");
  }

  tell({ held, lostNow, most, come }) {
    const { state, data } = this;
    $("now").value = `${state.step} of ${data.steps}`;
    const runs = chosenRuns(data, state);
    const heads = most / runs.length;
    const who = heads === 1 ? "this KV head" : `at least one of ${number(heads)} KV heads`;
    const kept = `${number(held)} of ${number(come)} tokens are held by ${who}`;
    $("step").setAttribute("aria-valuetext", `step ${state.step} of ${data.steps}`);
    if (state.step === 0) {
      $("told").textContent = `The prompt has just ended: ${kept}.`;
      return;
    }
    const run = runs.length === 1 ? runs[0] : null;
    const ended = run && state.step > run.steps;
    const read = run ? `takes in ${quoted(run.answer[Math.min(state.step, run.steps) - 1] ?? "")}` : "has passed";
    const lost = lostNow ? ` and ${plural(lostNow, "token")} ${lostNow === 1 ? "is" : "are"} evicted${heads === 1 ? "" : " somewhere"}` : "";
    $("told").textContent = ended
      ? `The answer ended at step ${run.steps}: ${kept}.`
      : `Step ${state.step} ${read}${lost}: ${kept}.`;
  }

  // -- strips: the prompt at a glance ----------------------------------------------------------------

  fillStrips() {
    for (const run of this.data.runs) {
      const label = element("span", "", shortName(this.data, run));
      label.title = run.policy;
      const canvas = element("canvas", "");
      canvas.setAttribute("role", "img");
      canvas.addEventListener("click", (event) => {
        const box = canvas.getBoundingClientRect();
        const token = Math.floor(((event.clientX - box.left) / box.width) * this.data.prompt);
        this.reader.moveTo(Math.max(0, Math.min(this.data.prompt - 1, token)), { focus: true });
      });
      $("strips").append(label, canvas);
      run.strip = { label, canvas };
    }
  }

  showStrips() {
    const { data, state } = this;
    const cells = chosenCells(data, state);
    const style = getComputedStyle(document.documentElement);
    const grain = style.getPropertyValue("--grain").trim().split(/\s+/).join(",");
    const strongest = Number(style.getPropertyValue("--strongest"));
    const chosen = chosenRuns(data, state);
    for (const run of data.runs) {
      const { label, canvas } = run.strip;
      label.classList.toggle("chosen", chosen.includes(run));
      const width = Math.max(1, Math.round(canvas.clientWidth * (window.devicePixelRatio || 1)));
      if (canvas.width !== width) canvas.width = width;
      canvas.height = 1;
      const context = canvas.getContext("2d");
      context.clearRect(0, 0, width, 1);
      const { kept } = counts(data, run, cells, state.step);
      const shares = new Float64Array(width);
      const tokens = new Uint32Array(width);
      const least = Math.max(1, Math.floor(data.prompt / width));
      for (let x = 0; x < width; x += 1) {
        const begin = Math.floor((x * data.prompt) / width);
        for (let i = begin; i < Math.min(data.prompt, begin + least); i += 1) {
          shares[x] += kept[i];
          tokens[x] += 1;
        }
        const share = tokens[x] ? shares[x] / tokens[x] / cells.length : 0;
        // Where hundreds of tokens meet in a pixel a few kept ones should still be seen, hence the root.
        context.fillStyle = `rgba(${grain}, ${Math.sqrt(share) * strongest})`;
        context.fillRect(x, 0, 1, 1);
      }
      const mean = kept.slice(0, data.prompt).reduce((sum, one) => sum + one, 0) / (data.prompt * cells.length);
      canvas.setAttribute("aria-label", `${run.label} holds ${percent(mean)} of the prompt`);
    }
  }

  // -- answers -------------------------------------------------------------------------------------------

  fillAnswers() {
    const [full] = this.data.runs;
    for (const run of this.data.runs) {
      const article = element("article", "");
      article.style.setProperty("--own", `var(--run-${run.number % 8})`);
      const figures = element("p", "figures");
      const told = element("p", "figures");
      const quote = element("blockquote", "");
      const same = run.answer.findIndex((text, i) => text !== full.answer[i]);
      const until = same < 0 ? run.answer.length : same;
      quote.append(run.answer.slice(0, until).join(""), element("span", "aside", run.answer.slice(until).join("")));
      if (run.full) told.textContent = "The model as it is, for comparison.";
      else if (same < 0 && run.answer.length === full.answer.length) told.textContent = "The same answer as the full cache's.";
      else told.textContent = `As the full cache's up to token ${number(until)}, then underlined.`;
      article.append(element("h3", "", run.label), figures, ...run.notes.map((note) => element("p", "figures", note)), told, quote);
      article.title = run.policy;
      $("answers").append(article);
      run.card = { figures };
    }
  }

  showAnswers() {
    const { data, state } = this;
    const [full] = data.runs;
    const following = chosenCells(data, { layer: "all", head: "all" });
    for (const run of data.runs) {
      const now = stepOf(run, state.step);
      const bytes = run.nbytes[now];
      const held = following.map((cell) => heldBy(run, cell, state.step));
      const [least, most] = [Math.min(...held), Math.max(...held)];
      const tokens = least === most ? number(most) : `${number(least)} to ${number(most)}`;
      const parts = [`${tokens} of ${number(data.prompt + now)} tokens a KV head`, mebibytes(bytes)];
      if (!run.full) parts.push(this.compared(bytes, full.nbytes[Math.min(now, full.steps)]));
      if (run.retained && !run.full) {
        const given = run.retained.flat().filter((one) => one !== null);
        if (given.length) parts.push(`${percent(given.reduce((sum, one) => sum + one, 0) / given.length)} of the attention retained`);
      }
      run.card.figures.textContent = parts.join(" · ");
    }
  }

  /** A cache's bytes beside the full cache's. */
  compared(bytes, full) {
    const times = (Math.max(bytes, full) / Math.min(bytes, full)).toFixed(1);
    if (times === "1.0") return "as large as the full cache";
    return `${times} times ${bytes < full ? "smaller" : "larger"} than the full cache`;
  }
}

function fill(select, options) {
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
}

const quoted = (text) => `“${[...text].map((letter) => VISIBLE[letter] ?? letter).join("")}”`;

async function start() {
  const explorer = new Explorer(await readData());
  window.explorer = explorer; // for whoever looks at the page from its console, and for tests
  // After the next frame all is drawn.
  await new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); });
  document.documentElement.dataset.ready = "yes";
  performance.mark("drawn");
  await explorer.figures.memory.draw();
}

start().catch((error) => {
  $("problem").hidden = false;
  $("problem").textContent = `This page cannot be shown in full: ${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
