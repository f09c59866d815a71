// What the page knows: unpacked arrays, and what follows from them for a choice of policy, layers and heads.

/** Bytes of a compressed blob in the page. */
async function unpacked(name) {
  const text = document.getElementById(`blob-${name}`).textContent;
  const letters = atob(text);
  const packed = new Uint8Array(letters.length);
  for (let i = 0; i < packed.length; i += 1) packed[i] = letters.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Undo the sorting of bytes into planes; `Kind` is the typed array of the values. */
function joined(planes, Kind) {
  const width = Kind.BYTES_PER_ELEMENT;
  const count = planes.length / width;
  const bytes = new Uint8Array(planes.length);
  for (let byte = 0; byte < width; byte += 1) {
    const start = byte * count;
    for (let i = 0; i < count; i += 1) bytes[i * width + byte] = planes[start + i];
  }
  return new Kind(bytes.buffer);
}

/** The header, and each run with its `evicted` and `scores`, [layer][head][token] in one array. */
async function readData() {
  const data = JSON.parse(new TextDecoder().decode(await unpacked("header")));
  [data.layers, data.heads] = data.shape;
  await Promise.all(data.runs.map(async (run, number) => {
    run.number = number;
    run.steps = run.nbytes.length - 1;
    run.full = number === 0;
    run.evicted = joined(await unpacked(`evicted-${number}`), Uint16Array);
    run.scores = joined(await unpacked(`scores-${number}`), Float32Array);
    run.held = heldCounts(data, run);
  }));
  data.steps = Math.max(...data.runs.map((run) => run.steps));
  return data;
}

/** The step that a run is at: an answer that ended early stays as it ended. */
const stepOf = (run, step) => Math.min(step, run.steps);

/** The runs that a choice of policy means: "all" is every one but the full cache, which would say nothing. */
function chosenRuns(data, state) {
  if (state.policy !== "all") return [data.runs[Number(state.policy)]];
  const compressed = data.runs.filter((run) => !run.full);
  return compressed.length ? compressed : data.runs;
}

/**
 * The KV heads that a choice of layer and head means, as layer * heads + head. All layers are those that follow the
 * policy: one that keeps its own window does so under every policy. Where all do, all are meant.
 */
function chosenCells(data, state) {
  const following = data.sliding.some((window) => window === null);
  const cells = [];
  for (let layer = 0; layer < data.layers; layer += 1) {
    if (state.layer === "all" ? following && data.sliding[layer] !== null : Number(state.layer) !== layer) continue;
    for (let head = 0; head < data.heads; head += 1) {
      if (state.head === "all" || Number(state.head) === head) cells.push(layer * data.heads + head);
    }
  }
  return cells;
}

/** How many of the cells hold each token of a run after a step, and how many lost it just then. */
function counts(data, run, cells, step) {
  const now = stepOf(run, step);
  const come = data.prompt + now;
  const kept = new Uint16Array(come);
  const lost = new Uint16Array(come);
  const fresh = now === step ? now : data.never - 1;
  for (const cell of cells) {
    const start = cell * run.tokens;
    for (let i = 0; i < come; i += 1) {
      const at = run.evicted[start + i];
      if (at > now) kept[i] += 1;
      else if (at === fresh) lost[i] += 1;
    }
  }
  return { kept, lost, come };
}

/** For each cell and step, how many tokens the KV head holds. */
function heldCounts(data, run) {
  const cells = data.layers * data.heads;
  const held = new Int32Array(cells * (run.steps + 1));
  for (let cell = 0; cell < cells; cell += 1) {
    const start = cell * (run.steps + 1);
    for (let i = 0; i < run.tokens; i += 1) {
      const come = Math.max(0, i - data.prompt + 1);
      held[start + come] += 1;
      const at = run.evicted[cell * run.tokens + i];
      if (at !== data.never) held[start + at] -= 1;
    }
    for (let step = 1; step <= run.steps; step += 1) held[start + step] += held[start + step - 1];
  }
  return held;
}

/** Tokens that one KV head holds after a step. */
const heldBy = (run, cell, step) => run.held[cell * (run.steps + 1) + stepOf(run, step)];

/** What became of a token in one KV head: where it was lost, or that it is there. */
function fate(data, run, cell, token, step) {
  const at = run.evicted[cell * run.tokens + token];
  if (at > stepOf(run, step)) return { kept: true, at: null };
  return { kept: false, at };
}

/** A run's name without its parameters, where no other run has the same. */
function shortName(data, run) {
  const [name] = run.label.split(":");
  return data.runs.some((other) => other !== run && other.label.split(":")[0] === name) ? run.label : name;
}

const number = (value) => value.toLocaleString("en-US");
const mebibytes = (bytes) => `${(bytes / 2 ** 20).toLocaleString("en-US", { maximumFractionDigits: 2 })} MiB`;
const percent = (share) => `${(100 * share).toLocaleString("en-US", { maximumFractionDigits: 1 })} %`;
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

/** A score in three digits; +infinity stands for a protected token, NaN for one that was never scored. */
function scoreText(score) {
  if (Number.isNaN(score)) return "none given";
  if (score === Infinity) return "protected, whatever its score";
  if (score === -Infinity) return "lowest";
  const size = Math.abs(score);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return score.toExponential(2);
  return String(Number(score.toPrecision(3)));
}
