// The text: its shading, the answer's tokens as they come, and the way from token to token by keyboard.

class Reader {
  /** `onToken` is called with a token's index and its element when it is pointed at or reached, else with null. */
  constructor(data, onToken) {
    this.data = data;
    this.onToken = onToken;
    this.box = document.getElementById("text");
    this.answer = document.getElementById("answer");
    this.prompt = [...this.box.querySelectorAll(":scope > .t")];
    this.nodes = this.prompt.slice();
    this.nodes.forEach((node, index) => { node.index = index; });
    this.drawn = new Map(); // element -> share and class it shows
    this.current = 0;
    this.prompt[0].tabIndex = 0;
    this.listen();
  }

  /** The text of a token; of a part of a character the whole character. */
  textOf(index) {
    let last = index;
    while (last < this.nodes.length - 1 && this.nodes[last].classList.contains("p")) last += 1;
    return this.nodes[last].textContent;
  }

  // -- shading -----------------------------------------------------------------------------------

  /** Show a choice: the share of its KV heads that hold each token. Only what changes is touched. */
  show(state) {
    const runs = chosenRuns(this.data, state);
    const cells = chosenCells(this.data, state);
    this.showAnswer(runs, state.step);
    const all = runs.map((run) => counts(this.data, run, cells, state.step));
    const most = cells.length * runs.length;
    const seen = new Uint8Array(this.nodes.length);
    let held = 0;
    let lostNow = 0;
    for (let i = 0; i < this.nodes.length; i += 1) {
      let kept = 0;
      let lost = 0;
      for (const one of all) {
        if (i >= one.come) continue;
        seen[i] = 1;
        kept += one.kept[i];
        lost += one.lost[i];
      }
      if (!seen[i]) continue; // chosen and not read in yet
      if (kept > 0) held += 1;
      const marked = lost > 0 && state.step > 0;
      if (marked) lostNow += 1;
      this.paint(this.nodes[i], kept / most, marked);
    }
    return { held, lostNow, most, come: Math.max(...all.map((one) => one.come)) };
  }

  paint(node, share, lost) {
    const wanted = `${share}${lost ? "!" : ""}`;
    if (this.drawn.get(node) === wanted) return;
    this.drawn.set(node, wanted);
    node.style.setProperty("--kept", share);
    node.classList.toggle("none", share === 0);
    node.classList.toggle("lost", lost);
  }

  /** The answer of the one policy chosen, as far as it has come; several policies have several answers. */
  showAnswer(runs, step) {
    const run = runs.length === 1 ? runs[0] : null;
    const focus = this.box.contains(document.activeElement); // before what has it is hidden
    if (this.answering !== run) {
      this.answering = run;
      this.answer.replaceChildren();
      this.nodes.length = this.prompt.length;
      const title = document.createElement("span");
      title.className = "answers-here";
      title.textContent = run ? `The answer with ${run.label}` : "Choose one policy to see its answer come here.";
      this.answer.append(title);
      for (const [j, text] of (run ? run.answer : []).entries()) {
        const node = document.createElement("span");
        node.className = text === "" ? "t p" : "t";
        node.setAttribute("role", "option");
        writeToken(node, text);
        node.index = this.nodes.length;
        this.nodes.push(node);
        this.answer.append(node);
      }
    }
    if (run) {
      const now = stepOf(run, step);
      run.answer.forEach((_, j) => {
        const node = this.nodes[this.prompt.length + j];
        node.hidden = j > now;
        node.classList.toggle("made", j < now);
        node.classList.toggle("next", j === now);
        if (j >= now) this.paint(node, 0, false);
      });
      this.shown = this.prompt.length + now + 1;
    } else {
      this.shown = this.prompt.length;
    }
    if (this.current >= this.shown) this.moveTo(this.shown - 1, { focus });
  }

  /** Scroll the text, and not the page, so that the answer's newest token is in sight. */
  showNewest() {
    if (!this.answering) return;
    const box = this.box.getBoundingClientRect();
    const newest = this.nodes[this.shown - 1].getBoundingClientRect();
    if (newest.bottom > box.bottom - 24) this.box.scrollTop += newest.bottom - box.bottom + 60;
    else if (newest.top < box.top) this.box.scrollTop += newest.top - box.top - 60;
  }

  // -- pointing and walking ----------------------------------------------------------------------

  listen() {
    this.box.addEventListener("pointerover", (event) => this.point(event.target));
    this.box.addEventListener("pointerleave", () => this.leave());
    this.box.addEventListener("click", (event) => {
      const node = event.target.closest(".t");
      if (node) this.moveTo(node.index, { focus: true, scroll: false });
    });
    this.box.addEventListener("focusin", (event) => this.point(event.target));
    this.box.addEventListener("focusout", () => this.onToken(null));
    this.box.addEventListener("scroll", () => this.leave(), { passive: true });
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  point(target) {
    const node = target.closest(".t");
    if (node) this.onToken(node.index, node);
  }

  leave() {
    const node = document.activeElement;
    if (node && this.box.contains(node) && node.index !== undefined) this.onToken(node.index, node);
    else this.onToken(null);
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -50, PageDown: 50 };
    let target;
    if (event.key in steps) target = this.current + steps[event.key];
    else if (event.key === "Home") target = 0;
    else if (event.key === "End") target = this.shown - 1;
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") target = this.besides(event.key === "ArrowUp" ? -1 : 1);
    else if (event.key === "Escape") return void this.onToken(null);
    else return;
    event.preventDefault();
    this.moveTo(Math.max(0, Math.min(this.shown - 1, target)), { focus: true });
  }

  /** The token above or below the current one. */
  besides(direction) {
    const from = this.nodes[this.current].getBoundingClientRect();
    const middle = from.left + from.width / 2;
    let line = null;
    let best = this.current;
    let nearest = Infinity;
    for (let i = this.current + direction; i >= 0 && i < this.shown; i += direction) {
      const box = this.nodes[i].getBoundingClientRect();
      if (direction * (box.top - from.top) < from.height * 0.6) continue;
      if (line === null) line = box.top;
      if (direction * (box.top - line) > from.height * 0.6) break;
      const away = Math.abs(box.left + box.width / 2 - middle);
      if (away < nearest) [best, nearest] = [i, away];
    }
    return best;
  }

  /** Make a token the current one. What was pointed at does not move under the finger, unless details would hide it. */
  moveTo(index, { focus = false, scroll = true } = {}) {
    this.nodes[this.current]?.removeAttribute("tabindex");
    this.prompt[0].removeAttribute("tabindex");
    this.current = index;
    const node = this.nodes[index];
    node.tabIndex = 0;
    if (!focus) return;
    const narrow = window.matchMedia("(max-width: 640px)").matches; // there the details lie at the bottom
    if (scroll) node.scrollIntoView({ block: narrow ? "center" : "nearest" });
    node.focus({ preventScroll: true });
    const hidden = node.getBoundingClientRect().bottom - document.getElementById("tip").getBoundingClientRect().top;
    if (narrow && hidden > 0) window.scrollBy(0, hidden + 12);
  }
}

/** A token's text with its newlines shown, as the template writes the prompt's. */
function writeToken(node, text) {
  text.split("\n").forEach((line, i) => {
    if (i > 0) node.append(document.createElement("b"), "\n");
    node.append(line);
  });
}
