"use strict";
const touch = matchMedia("(hover: none)").matches;
const nightly = matchMedia("(prefers-color-scheme: dark)");
const DAY = {ink: "#1B1F24", rule: "#E3E6EA", paper: "#FFFFFF"};
const NIGHT = {ink: "#E4E7EB", rule: "#343A42", paper: "#1B1F24"};

function inks(night) { return night ? NIGHT : DAY; }

// Colours of a plot that belong to the page and not to the data.
function paint(plot, night) {
  const now = inks(night), was = ["#000000", DAY.ink, NIGHT.ink];
  const look = {paper_bgcolor: now.paper, plot_bgcolor: now.paper, "font.color": now.ink};
  for (const key of Object.keys(plot._fullLayout || {})) {
    if (/^[xy]axis\d*$/.test(key)) look[key + ".gridcolor"] = now.rule;
  }
  (plot.data || []).forEach((trace, index) => {
    const line = trace.line || {}, marker = trace.marker || {};
    if (was.includes(line.color)) Plotly.restyle(plot, {"line.color": now.ink}, [index]);
    if (was.includes(marker.color)) Plotly.restyle(plot, {"marker.color": now.ink}, [index]);
  });
  Plotly.relayout(plot, look);
}
function paintAll(night) { document.querySelectorAll(".js-plotly-plot").forEach(plot => paint(plot, night)); }

const PAPER_PX = 650;  // what A4 and Letter leave a plot
let printing = false;
let beforePaper = () => {};  // a page that draws late draws the rest here
function forPaper(on) {
  printing = on;
  if (on) beforePaper();
  if (nightly.matches) paintAll(!on);
  document.querySelectorAll(".js-plotly-plot").forEach(plot => {
    if (on) {
      plot.before = {width: plot.layout.width ?? null, height: plot.layout.height, styled: plot.style.height};
      const width = Math.min(plot.clientWidth, PAPER_PX), tall = plot.clientHeight;
      const height = tall > 330 ? Math.round(0.72 * tall) : tall;
      plot.style.height = `${height}px`;
      Plotly.relayout(plot, {autosize: false, width, height});
    } else if (plot.before) {
      const {width, height, styled} = plot.before;
      plot.style.height = styled;
      Plotly.relayout(plot, {autosize: true, width, height}).then(() => Plotly.Plots.resize(plot));
    }
  });
}

addEventListener("load", () => document.querySelectorAll(".plotly-graph-div").forEach(plot => {
  if (touch) Plotly.relayout(plot, {dragmode: false});
  if (nightly.matches) paint(plot, true);
  Plotly.Plots.resize(plot);
}));
nightly.addEventListener("change", () => paintAll(nightly.matches));
addEventListener("beforeprint", () => forPaper(true));
addEventListener("afterprint", () => forPaper(false));
