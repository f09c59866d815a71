// Memory against tokens: a chart of plotly.js, which takes a second to start and therefore is not unpacked before the
// page can be used and the chart is in sight. Until then, and for whoever does not see it, its figures stand below it.

const DASHES = ["solid", "solid", "9px,4px", "2px,3px", "9px,3px,2px,3px", "14px,4px"];
const PROMPT_SHARE = 0.42; // of the width; the answer, which is much shorter, has a scale of its own
const MIB = 2 ** 20;

class MemoryChart {
  /** `onChoose` is called with the step that is clicked at. */
  constructor(box, data, onChoose) {
    Object.assign(this, { box, data, onChoose, step: 0, drawn: false });
    this.plot = element("div", "plot");
    this.plot.setAttribute("role", "img");
    this.readout = element("p", "readout");
    this.logarithmic = element("input", "");
    this.logarithmic.type = "checkbox";
    this.logarithmic.disabled = true; // as long as there is no chart
    const label = element("label", "option");
    label.append(this.logarithmic, "logarithmic scale");
    box.append(this.key(), this.plot, label, this.readout);
  }

  key() {
    const key = element("p", "key");
    for (const run of this.data.runs) {
      const dash = DASHES[run.number % DASHES.length];
      const sample = svgElement("svg", { width: 26, height: 10, "aria-hidden": "true" });
      sample.append(svgElement("path", {
        d: "M0 5H26", style: `stroke: var(${this.variable(run)})`,
        "stroke-dasharray": dash === "solid" ? "none" : dash.replaceAll("px", ""),
      }));
      const item = element("span", "");
      item.append(sample, run.label);
      key.append(item);
    }
    return key;
  }

  variable(run) { return `--run-${run.number % 8}`; }

  /** Tell of a step, and mark it once there is a chart. */
  show(step) {
    this.step = step;
    this.tell();
    if (this.drawn) Plotly.relayout(this.plot, { shapes: this.shapes() });
  }

  /** In words, what each policy's cache takes now. */
  tell() {
    const said = this.data.runs.map((run) => `${run.label} ${mebibytes(run.nbytes[stepOf(run, this.step)])}`);
    this.readout.textContent = `${number(this.data.prompt + this.step)} tokens: ${said.join(", ")}`;
    this.plot.setAttribute("aria-label", `Chart of memory against tokens. ${this.readout.textContent}`);
  }

  /** Draw the chart when that is in nobody's way. */
  async draw() {
    await loaded();
    await nearSight(this.box);
    await idle();
    await runScript(await unpacked("plotly"));
    await Plotly.newPlot(this.plot, this.traces(), this.layout(), {
      displayModeBar: false, doubleClick: false, showTips: false,
    });
    this.drawn = true;
    this.plot.on("plotly_click", ({ points }) => {
      const at = points.find((point) => point.xaxis._id === "x2");
      if (at) this.onChoose(at.x - this.data.prompt);
    });
    this.logarithmic.disabled = false;
    const again = () => Plotly.react(this.plot, this.traces(), this.layout());
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    this.logarithmic.addEventListener("change", again);
    onWidth(this.plot, again);
    this.plot.dataset.drawn = "yes";
    performance.mark("chart");
  }

  // -- what plotly is told -----------------------------------------------------------------------

  /** For each policy what prompts would take, dotted, and what was measured. */
  traces() {
    const { data } = this;
    const common = (run, bytes) => ({
      name: shortName(data, run), mode: "lines", showlegend: false, y: bytes.map((one) => one / MIB),
      text: bytes.map(mebibytes), hovertemplate: "%{fullData.name}: %{text}<extra></extra>",
    });
    const foretold = data.runs.map((run) => ({
      ...common(run, run.foretold.map(([, bytes]) => bytes)), meta: "foretold", x: run.foretold.map(([tokens]) => tokens),
      line: { color: this.colour(run), width: 1.5, dash: "1px,2px" },
    }));
    const measured = data.runs.map((run) => ({
      ...common(run, run.nbytes), meta: "measured", xaxis: "x2", x: run.nbytes.map((_, step) => data.prompt + step),
      line: { color: this.colour(run), width: 2.5, dash: DASHES[run.number % DASHES.length] },
    }));
    return [...foretold, ...measured];
  }

  /**
   * Lines at the prompt's end and at the present step, and there a mark for each policy. As shapes they move in 2 ms,
   * as a trace in 40.
   */
  shapes() {
    const { data, edge } = this;
    const colour = styled("--soft");
    const across = (step) => edge + (1 - edge) * (step / Math.max(1, data.steps));
    const [bottom, top] = this.range;
    const up = (mib) => ((this.logarithmic.checked ? Math.log10(mib) : mib) - bottom) / (top - bottom);
    const upright = (step, line) => ({
      type: "line", layer: "below", xref: "paper", x0: across(step), x1: across(step), yref: "paper", y0: 0, y1: 1,
      line: { color: colour, ...line },
    });
    const marks = data.runs.map((run) => {
      const at = stepOf(run, this.step);
      return {
        type: "circle", name: run.label, xref: "paper", xsizemode: "pixel", xanchor: across(at), x0: -4, x1: 4,
        yref: "paper", ysizemode: "pixel", yanchor: up(run.nbytes[at] / MIB), y0: -4, y1: 4, fillcolor: this.colour(run), line: { width: 0 },
      };
    });
    return [upright(0, { width: 1 }), upright(this.step, { width: 1.5, dash: "2px,3px" }), ...marks];
  }

  colour(run) { return styled(this.variable(run)); }

  /** Where the prompt's part ends, of the width. */
  get edge() { return this.data.steps ? PROMPT_SHARE : 0.97; }

  /** Of MiB from the bottom to the top; their logarithms on such a scale. */
  get range() {
    const { runs } = this.data;
    const bytes = runs.flatMap((run) => [...run.nbytes, ...run.foretold.map(([, one]) => one)]);
    const most = Math.max(...bytes) / MIB;
    // A cache of a few tokens is so small that it would have most of a logarithmic scale.
    const least = Math.min(...runs.flatMap((run) => run.nbytes)) / MIB / 4;
    return this.logarithmic.checked ? [Math.log10(least), Math.log10(1.3 * most)] : [0, 1.06 * most];
  }

  layout() {
    const { edge, data: { prompt, steps } } = this;
    const soft = styled("--soft");
    const width = Math.max(160, this.plot.clientWidth);
    const axis = (title, more) => ({
      title: { text: title, standoff: 6 }, color: soft, gridcolor: styled("--line"), linecolor: styled("--line"),
      zeroline: false, fixedrange: true, ...more,
    });
    const tokens = (title, more) => axis(title, {
      spikecolor: soft, spikethickness: 1, spikedash: "solid", unifiedhovertitle: { text: "%{x:,} tokens" }, ...more,
    });
    const lengths = ticks(0, prompt, Math.floor((edge * width) / 60)).filter((length) => length < 0.8 * prompt);
    const answered = ticks(0, steps, Math.floor(((1 - edge) * width) / 45)).filter((step) => step > 0 && Number.isInteger(step));
    return {
      xaxis: tokens("prompt (foretold)", {
        domain: [0, edge], range: [0, prompt], tickvals: [...lengths, prompt], ticktext: [...lengths, prompt].map(number),
      }),
      xaxis2: tokens(steps ? "answer (measured)" : "", {
        domain: [edge, 1], range: [prompt, prompt + Math.max(1, steps)], tickvals: answered.map((step) => prompt + step),
        ticktext: answered.map((step) => `+${number(step)}`),
      }),
      yaxis: axis("cache, MiB", this.logarithmic.checked
        ? { type: "log", range: this.range, dtick: this.range[1] - this.range[0] > 1.3 ? 1 : "D2" }
        : { type: "linear", range: this.range, nticks: 6 }),
      shapes: this.shapes(),
      width: this.plot.clientWidth,
      height: this.plot.clientHeight,
      margin: { l: 54, r: 14, t: 8, b: 40 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 11, color: soft },
      paper_bgcolor: styled("--panel"),
      plot_bgcolor: styled("--panel"),
      hovermode: "x unified",
      hoverdistance: -1,
      hoverlabel: {
        bgcolor: styled("--panel"), bordercolor: soft, font: { color: styled("--ink"), size: 12 }, namelength: 24,
      },
      dragmode: false,
    };
  }
}

/** A variable of the style sheet, as it is now. */
function styled(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** When the page has been read to its end, its blobs included. */
function loaded() {
  if (document.readyState === "complete") return null;
  return new Promise((done) => { window.addEventListener("load", done, { once: true }); });
}

function nearSight(box) {
  return new Promise((done) => {
    const observer = new IntersectionObserver((seen) => {
      if (!seen.some((one) => one.isIntersecting)) return;
      observer.disconnect();
      done();
    }, { rootMargin: "100px" });
    observer.observe(box);
  });
}

function idle() {
  return new Promise((done) => {
    if (window.requestIdleCallback) window.requestIdleCallback(done);
    else setTimeout(done, 300);
  });
}

/** Run a script of these bytes; from its own address it is compiled beside what the page does. */
function runScript(bytes) {
  const address = URL.createObjectURL(new Blob([bytes], { type: "text/javascript" }));
  const script = element("script", "");
  return new Promise((done, failed) => {
    script.onload = done;
    script.onerror = () => failed(new Error("the chart's library cannot be run"));
    script.src = address;
    document.head.append(script);
  }).finally(() => {
    URL.revokeObjectURL(address);
    script.remove();
  });
}
