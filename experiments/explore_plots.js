"use strict";
// The pictures. Colours are those of the palette; what keeps and what misses differs in shape as well.
const C = D.colours;
const CONFIG = {responsive: true, displaylogo: false, displayModeBar: touch ? false : "hover",
                modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"]};

function narrow() { return document.documentElement.clientWidth < 700; }
function look(changes) {
  const now = inks(nightly.matches && !printing);
  const base = JSON.parse(JSON.stringify(D.look));
  Object.assign(base, {paper_bgcolor: now.paper, plot_bgcolor: now.paper}, changes);
  base.font.color = now.ink;
  for (const axis of ["xaxis", "yaxis"]) base.template.layout[axis].gridcolor = now.rule;
  if (touch) base.dragmode = false;
  return base;
}
function main() { return nightly.matches && !printing ? C.sky : C.blue; }
function ink() { return inks(nightly.matches && !printing).ink; }
function draw(id, traces, layout) {
  const plot = document.getElementById(id);
  const first = !plot.data;
  Plotly.react(plot, traces, look(layout), CONFIG);
  if (first) {
    if (id === "plot-front") plot.on("plotly_afterplot", moveFrame);
    plot.on("plotly_click", event => {
      const i = pointOf(event.points[0]);
      if (Number.isInteger(i)) select(i, true);
    });
  }
}
function pointOf(hit) {
  const c = hit.customdata;
  return Array.isArray(c) ? c[0] : c;
}
function clear(text) { return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;"); }
function spans(values) {
  const positive = values.filter(v => known(v) && v > 0);
  return positive.length > 1 && positive.length === values.filter(known).length &&
    Math.max(...positive) / Math.min(...positive) > 30 ? "log" : "linear";
}
function axisOf(key, values) {
  const type = spans(values), unit = FIGURE[key].unit;
  const axis = {title: {text: FIGURE[key].label + (type === "log" ? ", logarithmic" : "")}, type};
  if (type === "linear" && unit !== "%") axis.rangemode = "tozero";
  if (unit === "%") axis.tickformat = ".0%";
  if (unit === "$") axis.tickformat = "$,.2~f";
  return axis;
}
function hover(i, ...keys) {
  const lines = [`<b>#${D.number[i]}</b> ${clear(named(i))}`];
  for (const key of keys) lines.push(`${label(key)} ${shown(key, value(key, i))}${ends(key, i) && ` (95%: ${ends(key, i)})`}`);
  const why = broken(i);
  lines.push((why.length ? "✗ " + clear(why[0]) : "✓ keeps the promises") + (doubtful(i).length ? ", not certain" : ""));
  return lines.join("<br>");
}
function limitOf(key) {
  for (const metric of LATENCIES) {
    const limit = S.limits[metric];
    if (limit && known(limit.ms) && key === `${limit.statistic}_${metric}_ms`) return limit.ms;
  }
  return null;
}
// The limit where it is worth the room: not far above every point.
function limitNear(key) {
  const limit = limitOf(key);
  return limit !== null && limit <= 2 * Math.max(...DONE.map(i => value(key, i) ?? 0)) ? limit : null;
}
function dashed(shape) { return {type: "line", line: {color: C.limit, dash: "dash", width: 1.5}, ...shape}; }
function scatter(points, x, y, changes) {
  return {type: "scatter", mode: "markers", x: points.map(i => value(x, i)), y: points.map(i => value(y, i)),
          customdata: points, text: points.map(i => hover(i, x, y)), hovertemplate: "%{text}<extra></extra>", ...changes};
}
// A frame around a point of a small picture.
function frame(x, y, axes, logs) {
  const place = (v, log) => log ? Math.log10(v) : v;
  return {x: place(x, logs[0]), y: place(y, logs[1]), ...axes, text: "", width: 12, height: 12, showarrow: false,
          bordercolor: ink(), borderwidth: 3, borderpad: 2, captureevents: false};
}

function drawFront() {
  const kept = keeping(), held = new Set(kept), rest = DONE.filter(i => !held.has(i));
  const edge = front(kept.length ? kept : DONE, S.x, S.y);
  const all = key => DONE.map(i => value(key, i));
  const many = DONE.length > 400 ? 6 : 9;
  const traces = [
    scatter(rest, S.x, S.y, {name: `miss (${rest.length})`,
      marker: {symbol: "x-thin", size: many, color: C.grey, line: {width: 1.6, color: C.grey}}}),
    scatter(kept.filter(i => !edge.includes(i)), S.x, S.y, {name: `keep the promises (${kept.length})`,
      marker: {symbol: "circle", size: many, color: main(), line: {width: 0}}}),
    scatter(edge, S.x, S.y, {name: kept.length ? "front of those" : "front of all", mode: "lines+markers",
      line: {color: C.orange, width: 2}, marker: {symbol: "diamond", size: many + 3, color: C.orange}}),
  ];
  const shapes = [], mx = limitNear(S.x), my = limitNear(S.y);
  if (mx !== null) shapes.push(dashed({x0: mx, x1: mx, yref: "paper", y0: 0, y1: 1}));
  if (my !== null) shapes.push(dashed({y0: my, y1: my, xref: "paper", x0: 0, x1: 1}));
  draw("plot-front", traces, {height: narrow() ? 380 : 430, hovermode: "closest", shapes,
    xaxis: axisOf(S.x, all(S.x)), yaxis: axisOf(S.y, all(S.y))});
  return edge;
}

// The frame in the trade-off lies over the plot: moving it draws nothing again.
function moveFrame() {
  const full = $("plot-front")._fullLayout, box = $("frame"), i = S.selected;
  if (!full || !full.xaxis || i === null) return;
  const [x, y] = [full.xaxis.d2p(value(S.x, i)), full.yaxis.d2p(value(S.y, i))];
  const inside = x >= 0 && x <= full.xaxis._length && y >= 0 && y <= full.yaxis._length;
  box.hidden = !inside || !known(value(S.x, i)) || !known(value(S.y, i));
  box.style.transform = `translate(${full.xaxis._offset + x - 11}px, ${full.yaxis._offset + y - 11}px)`;
}

// Doubling values such as 512, 1024, 2048 are even on a logarithmic axis.
function spacing(values) {
  const uneven = of => {
    const gaps = values.slice(1).map((v, n) => of(v) - of(values[n]));
    return Math.max(...gaps) / Math.min(...gaps);
  };
  return values.length > 2 && values[0] > 0 && uneven(Math.log) < uneven(v => v) ? "log" : "linear";
}
function knobAxis(k) {
  if (!k.numeric) {
    const names = k.values.map((_, n) => knobText(k.key, n));
    return {type: "category", categoryorder: "array", categoryarray: names, range: [-0.3, names.length - 0.7], title: {text: k.label}};
  }
  const ticks = k.values.filter(known), axis = {title: {text: k.label}, type: spacing(ticks)};
  if (axis.type === "log" || ticks.length <= 5) Object.assign(axis, {tickmode: "array", tickvals: ticks, ticktext: ticks.map(fmt)});
  return axis;
}
function knobX(k, i) {
  const v = k.values[at(k.key, i)];
  return k.numeric ? v : knobText(k.key, at(k.key, i));
}
// Of points that lie on one another in a small picture, one.
function sparse(k) {
  const log = spans(DONE.map(i => value(S.metric, i))) === "log", of = v => log ? Math.log(v) : v, seen = new Map();
  const values = DONE.map(i => value(S.metric, i)).filter(known).map(of), low = Math.min(...values), wide = Math.max(...values) - low || 1;
  for (const i of DONE) {
    const v = value(S.metric, i);
    if (known(v)) seen.set(`${at(k.key, i)} ${Math.round((of(v) - low) / wide * 30)}`, i);
  }
  return [...seen.values()];
}
function drawSlices() {
  const columns = narrow() ? 1 : D.knobs.length === 4 ? 2 : Math.min(3, D.knobs.length), rows = Math.ceil(D.knobs.length / columns);
  const traces = [], layout = {height: 70 + 240 * rows, showlegend: false, hovermode: "closest", shapes: [], annotations: []};
  const every = DONE.map(i => value(S.metric, i)), type = spans(every), limit = limitNear(S.metric);
  D.knobs.forEach((k, n) => {
    const row = Math.floor(n / columns), column = n % columns, number = n ? n + 1 : "";
    const width = 1 / columns, height = 1 / rows;
    const domain = {x: [column * width + (column ? 0.05 : 0), (column + 1) * width - 0.01],
                    y: [1 - (row + 1) * height + (row < rows - 1 ? 0.3 * height : 0), 1 - row * height]};
    const axes = {xaxis: "x" + number, yaxis: "y" + number};
    layout["xaxis" + number] = {...knobAxis(k), domain: domain.x, anchor: axes.yaxis};
    layout["yaxis" + number] = {...axisOf(S.metric, every), title: {text: label(S.metric)}, domain: domain.y, anchor: axes.xaxis,
                                ...(n ? {matches: "y"} : {}), ...(column ? {title: {text: ""}} : {})};
    const line = S.selected === null ? [] : sameBut(S.selected, k.key).sort((a, b) => at(k.key, a) - at(k.key, b));
    const rest = DONE.length > line.length ? sparse(k) : [];
    const put = (points, changes) => traces.push({...scatter(points, S.metric, S.metric, changes),
      x: points.map(i => knobX(k, i)), y: points.map(i => value(S.metric, i)), ...axes});
    put(rest, {marker: {size: 4, color: C.faint}});
    if (line.length > 1) {
      put(line, {mode: "lines+markers", line: {color: main(), width: 2},
                 marker: {size: 8, color: line.map(i => broken(i).length ? C.grey : main()),
                          symbol: line.map(i => broken(i).length ? "x" : "circle")}});
    }
    if (S.selected !== null && known(value(S.metric, S.selected))) {
      // A category is placed by its number: its name could be one, too.
      layout.annotations.push(frame(k.numeric ? knobX(k, S.selected) : at(k.key, S.selected), value(S.metric, S.selected),
        {xref: axes.xaxis, yref: axes.yaxis}, [layout["xaxis" + number].type === "log", type === "log"]));
    }
    if (limit !== null) layout.shapes.push(dashed({xref: axes.xaxis + " domain", yref: axes.yaxis, x0: 0, x1: 1, y0: limit, y1: limit}));
  });
  if (type === "log") layout.yaxis.rangemode = "normal";
  draw("plot-slices", traces, layout);
}

const MOST_CELLS = 24;
function bins(k) {
  const n = k.values.length;
  if (n <= MOST_CELLS) return {names: k.values.map((_, i) => knobText(k.key, i)), of: i => i};
  const size = Math.ceil(n / 12), names = [];
  for (let from = 0; from < n; from += size) names.push(`${knobText(k.key, from)} – ${knobText(k.key, Math.min(from + size, n) - 1)}`);
  return {names, of: i => Math.floor(i / size)};
}
function drawHeat() {
  const H = S.heat, kx = KNOB[H.x], ky = KNOB[H.y], bx = bins(kx), by = bins(ky);
  const pool = H.others === "same" && S.selected !== null ? sameBut(S.selected, kx.key, ky.key) : DONE;
  const cells = by.names.map(() => bx.names.map(() => null));
  for (const i of pool) {
    const column = bx.of(at(kx.key, i)), row = by.of(at(ky.key, i)), before = cells[row][column];
    cells[row][column] = before === null ? i : best([before, i], H.metric) ?? before;
  }
  const of = f => cells.map(row => row.map(i => i === null ? null : f(i)));
  const z = of(i => value(H.metric, i)), flat = z.flat(), log = spans(flat) === "log";
  const few = bx.names.length * (narrow() ? 2.2 : 1) <= 14;
  const unit = FIGURE[H.metric].unit, short = v => unit === "%" ? Math.round(v * 100) + " %" : unit === "$" ? "$" + v.toFixed(2) : fmt(v);
  const trace = {
    type: "heatmap", x: bx.names, y: by.names, z: log ? of(i => Math.log10(value(H.metric, i))) : z,
    customdata: cells, colorscale: "Cividis", reversescale: better(H.metric) < 0, xgap: 2, ygap: 2, hoverongaps: false,
    text: cells.map(row => row.map(i => i === null ? "" : (broken(i).length ? "✗ " : "") + (few ? short(value(H.metric, i)) : ""))), texttemplate: "%{text}",
    hovertext: of(i => hover(i, H.metric)), hovertemplate: "%{hovertext}<extra></extra>",
    colorbar: {thickness: 12, title: {text: ""}, ...(log ? logTicks(flat) : {})}, showscale: !narrow(),
  };
  const shapes = [];
  if (S.selected !== null) {
    const x = bx.of(at(kx.key, S.selected)), y = by.of(at(ky.key, S.selected));
    shapes.push({type: "rect", x0: x - .5, x1: x + .5, y0: y - .5, y1: y + .5, line: {color: C.orange, width: 3}});
  }
  const missing = cells.flat().filter(i => i === null).length;
  document.getElementById("heat-note").textContent = !pool.length ? "No point has these values." :
    (missing ? `${missing} of ${cells.flat().length} cells have no point. ` : "") +
    (H.others === "same" ? `Other knobs as in #${D.number[S.selected]}. ` : "Each cell shows its best point. ") + "✗ misses a promise.";
  draw("plot-heat", [trace], {height: Math.max(300, 110 + 42 * by.names.length), shapes,
    xaxis: {title: {text: kx.label}, type: "category", showgrid: false},
    yaxis: {title: {text: ky.label}, type: "category", showgrid: false}});
}
function logTicks(values) {
  const positive = values.filter(v => v > 0), low = Math.floor(Math.log10(Math.min(...positive))), ticks = [];
  for (let power = low; power <= Math.log10(Math.max(...positive)); power++) {
    for (const m of [1, 3]) ticks.push(power + Math.log10(m));
  }
  return {tickvals: ticks, ticktext: ticks.map(t => fmt(10 ** t))};
}

function drawMoney() {
  const found = capacities(), priced = found.filter(c => known(c.usd) && c.load > 0);
  const unit = D.load ? KNOB[D.load].label : FIGURE.capacity ? FIGURE.capacity.label : "";
  const sorted = [...priced].sort((a, b) => a.usd - b.usd || b.load - a.load), edge = [];
  for (const c of sorted) if (!edge.length || c.load > edge[edge.length - 1].load) edge.push(c);
  const places = new Map();
  for (const c of priced) {
    const key = `${c.usd} ${c.load} ${c.open}`;
    places.set(key, [...(places.get(key) || []), c]);
  }
  const text = list => {
    const names = list.slice(0, 6).map(c => clear(named(c.point, D.load)));
    const more = list.length > 6 ? [`… and ${list.length - 6} more`] : [];
    return [`<b>${list[0].open ? "at least " : ""}${fmt(list[0].load)} for $${list[0].usd.toFixed(2)} an hour</b>`, ...names, ...more].join("<br>");
  };
  const put = (open, changes) => {
    const lists = [...places.values()].filter(list => list[0].open === open);
    const marker = {...changes.marker, size: lists.map(list => 8 + 4 * Math.sqrt(list.length)), color: main()};
    return {type: "scatter", mode: "markers", x: lists.map(l => l[0].usd), y: lists.map(l => l[0].load), customdata: lists.map(l => l[0].point),
            text: lists.map(text), hovertemplate: "%{text}<extra></extra>", ...changes, marker};
  };
  const ranked = priced.sort((a, b) => b.load / b.usd - a.load / a.usd);
  if (new Set(priced.map(c => c.usd)).size > 1) {
    draw("plot-money", [
      put(false, {name: "capacity", marker: {}}),
      put(true, {name: "at least: kept at every load tried", marker: {symbol: "triangle-up-open", line: {width: 2, color: main()}}}),
      {type: "scatter", mode: "lines", name: "most for the money", x: edge.map(c => c.usd), y: edge.map(c => c.load),
       line: {color: C.orange, width: 2, shape: "hv"}, hoverinfo: "skip"},
    ], {height: 400, hovermode: "closest", xaxis: {title: {text: "Dollars per hour"}, tickformat: "$,.2~f", rangemode: "tozero"},
        yaxis: {title: {text: unit}, rangemode: "tozero"}});
  } else {
    // All cost the same: who holds most.
    const bars = ranked.slice(0, 16);
    draw("plot-money", [{type: "bar", orientation: "h", x: bars.map(c => c.load), y: bars.map(c => clear(named(c.point, D.load))),
      customdata: bars.map(c => c.point), text: bars.map(c => (c.open ? "≥ " : "") + fmt(c.load)), marker: {color: main()},
      hovertemplate: "%{text}<extra></extra>"}], {height: Math.max(300, 110 + 30 * bars.length), bargap: 0.3,
      xaxis: {title: {text: unit}, rangemode: "tozero"},
      yaxis: {autorange: "reversed", type: "category"}});
  }
  const none = found.filter(c => !(c.load > 0)).length, unpriced = found.filter(c => c.load > 0 && !known(c.usd)).length;
  document.getElementById("money-note").textContent =
    (priced.length && new Set(priced.map(c => c.usd)).size === 1 ? `Each costs $${priced[0].usd.toFixed(2)} an hour. ` : "") +
    (none ? `${none} of ${found.length} configurations keep the promises at none of the loads. ` : "") +
    (unpriced ? `${unpriced} have no price: set one above.` : "");
  return ranked;
}
