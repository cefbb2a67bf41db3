"use strict";
// The page: what the controls say, the answer, the chosen point, and the order in which things are drawn again.
const $ = id => document.getElementById(id);
const priced = () => DONE.some(i => known(value("usd_per_hour", i)));

function options(id, items, chosen, changed) {
  const box = $(id);
  box.replaceChildren(...items.map(([key, text]) => new Option(text, key, false, key === chosen)));
  box.onchange = () => { changed(box.value); };
}
function figuresShown(judged) {
  return D.figures.filter(f => (!judged || f.better) && DONE.some(i => known(value(f.key, i)))).map(f => [f.key, f.label]);
}

// Controls of the limits: a statistic, a slider (logarithmic) and a number for each latency.
function limitControls() {
  for (const metric of LATENCIES) {
    const statistics = D.statistics.filter(s => DONE.some(i => known(value(`${s}_${metric}_ms`, i))));
    const row = $("limit-" + metric);
    if (!statistics.length) { row.hidden = true; continue; }
    const asked = D.limits[metric], statistic = asked && statistics.includes(asked.statistic) ? asked.statistic :
      statistics.includes("p95") ? "p95" : statistics[0];
    S.limits[metric] = {statistic, ms: asked ? asked.ms : null};
    const [slider, number, none] = [row.querySelector("[type=range]"), row.querySelector("[type=number]"), row.querySelector("button")];
    options(`stat-${metric}`, statistics.map(s => [s, s === "mean" ? "Mean" : s.toUpperCase()]), statistic, s => {
      S.limits[metric].statistic = s; range(); changed();
    });
    let low = 1, high = 10;
    const range = () => {
      const seen = DONE.map(i => value(`${S.limits[metric].statistic}_${metric}_ms`, i)).filter(v => known(v) && v > 0);
      const given = S.limits[metric].ms || seen[0] || 1;
      low = Math.min(...seen, given) / 1.2; high = Math.max(...seen, given) * 1.2;
      write();
    };
    const write = () => {
      const ms = S.limits[metric].ms;
      number.value = known(ms) ? Number(ms.toPrecision(3)) : "";
      slider.value = known(ms) ? 100 * Math.log(ms / low) / Math.log(high / low) : 100;
      slider.setAttribute("aria-valuetext", known(ms) ? fmt(ms) + " ms" : "no limit");
      none.disabled = !known(ms);
    };
    slider.oninput = () => { S.limits[metric].ms = Number((low * (high / low) ** (slider.value / 100)).toPrecision(2)); write(); changed(); };
    number.onchange = () => { S.limits[metric].ms = number.value > 0 ? Number(number.value) : null; write(); changed(); };
    none.onclick = () => { S.limits[metric].ms = null; write(); changed(); };
    range();
  }
}
function priceControls() {
  const used = [...new Set(D.gpu)];
  $("prices").replaceChildren(...used.map(gpu => {
    const given = D.prices[gpu], box = document.createElement("div"), id = "price-" + gpu;
    S.prices[gpu] = given ? given.usd : null;
    box.innerHTML = `<label for="${id}"></label><input type="number" id="${id}" min="0" step="any" inputmode="decimal">`;
    box.firstChild.textContent = `$ per ${gpu} and hour`;
    const input = box.lastChild;
    input.value = given ? given.usd : "";
    input.oninput = () => { S.prices[gpu] = input.value > 0 ? Number(input.value) : null; changed(); };
    return box;
  }));
}

// Controls of the knobs: a slider for numbers, a list for names; both move to the nearest point that exists.
function knobControls() {
  $("knobs").replaceChildren(...D.knobs.map(k => {
    const box = document.createElement("div");
    box.className = "knob";
    const top = k.values.length - 1, id = "knob-" + k.key;
    box.innerHTML = k.numeric
      ? `<label for="${id}"></label><input type="range" id="${id}" min="0" max="${top}" step="1"><output for="${id}"></output>`
      : `<label for="${id}"></label><select id="${id}"></select>`;
    box.firstChild.textContent = k.label;
    if (k.label.toLowerCase() !== k.key) box.firstChild.append(Object.assign(document.createElement("small"), {textContent: k.key}));
    const input = box.children[1];
    if (!k.numeric) input.replaceChildren(...k.values.map((_, i) => new Option(knobText(k.key, i), i)));
    input.oninput = () => {
      const found = nearest(S.selected, k.key, Number(input.value));
      select(found.point);
      $("moved").textContent = found.exact ? "" : "No point has just these values; this is the nearest that was run.";
    };
    return box;
  }));
}

function select(i, remember) {
  S.selected = i;
  $("moved").textContent = "";
  if (remember) history.replaceState(null, "", "#" + D.number[i]);
  soon(false);
}
function item(mark, text) {
  const li = document.createElement("li");
  li.className = mark; li.textContent = text;
  return li;
}
function showPoint() {
  const i = S.selected;
  $("point-name").textContent = D.kind === "plan" ? `Fleet ${D.number[i]}: ${named(i)}` : `Point #${D.number[i]}`;
  for (const k of D.knobs) {
    const input = $("knob-" + k.key), text = knobText(k.key, at(k.key, i));
    input.value = at(k.key, i);
    if (k.numeric) { input.nextSibling.value = text; input.setAttribute("aria-valuetext", text); }
  }
  const why = broken(i), limited = LATENCIES.some(m => S.limits[m] && known(S.limits[m].ms));
  const lines = why.length ? why.map(w => item("bad", w)) : [item(limited ? "good" : "plain", limited ? "Keeps every promise." : "No promise is set.")];
  if (doubts(i)) lines.push(item("warn", doubts(i)));
  const bound = (D.words.bound || [])[i], load = (D.words.load || [])[i];
  if (load) lines.push(item(load === "stable" ? "plain" : "warn", `Load: ${load.replace(/_/g, " ")}.`));
  if (bound) lines.push(item("plain", `Bound by ${bound.replace(/_/g, " ")}.`));
  if (D.runs[i] > 1) lines.push(item("plain", `Means over ${D.runs[i]} runs.`));
  $("point-state").replaceChildren(...lines);
  $("point-figures").replaceChildren(...cards(i).map(([key, over]) => {
    const box = document.createElement("div"), b = document.createElement("b"), span = document.createElement("span");
    b.textContent = shown(key, value(key, i)); span.textContent = label(key) + (ends(key, i) && `, ${ends(key, i)}`);
    box.append(b, span);
    if (over) box.className = "over";
    return box;
  }));
  const link = $("point-report"), made = D.report[i] && D.has[i];
  link.hidden = !made;
  if (made) link.href = D.report[i]; else link.removeAttribute("href");
  $("bar-text").textContent = `${mark(i)} #${D.number[i]} ${named(i)}`;
  $("bar-report").hidden = !made;
  if (made) $("bar-report").href = D.report[i]; else $("bar-report").removeAttribute("href");
  $("point-make").hidden = made || !D.make;
  if (D.make) $("make-command").textContent = D.make.replace("NUMBER", D.number[i]);
  $("point-run").hidden = !D.command[i];
  $("run-command").textContent = D.command[i] || "";
  const all = [...DONE].sort((a, b) => a - b), place = all.indexOf(i);
  $("previous").disabled = place <= 0; $("next").disabled = place < 0 || place === all.length - 1;
  $("previous").onclick = () => select(all[place - 1], true);
  $("next").onclick = () => select(all[place + 1], true);
}
function cards(i) {
  const keys = LATENCIES.filter(m => S.limits[m]).map(m => `${S.limits[m].statistic}_${m}_ms`);
  const rest = ["output_throughput", "output_throughput_per_gpu", "request_throughput", "capacity", "headroom", "slo_attainment",
    "num_gpus", "usd_per_hour", "usd_per_month", "usd_per_million_output_tokens", "joules_per_output_token", "sim_gpu_busy_share", "sim_kv_occupancy_mean"];
  const have = key => FIGURE[key] && known(value(key, i));
  const alone = DONE.every(j => value("num_gpus", j) === 1);
  return [...keys.filter(have).map(key => [key, limitOf(key) !== null && value(key, i) > limitOf(key)]),
          ...rest.filter(key => have(key) && !(alone && ["output_throughput_per_gpu", "num_gpus"].includes(key))).map(key => [key, false])];
}

function promises() {
  const parts = LATENCIES.filter(m => S.limits[m] && known(S.limits[m].ms))
    .map(m => `${label(`${S.limits[m].statistic}_${m}_ms`)} ≤ ${fmt(S.limits[m].ms)} ms`);
  return parts.length ? parts.join(" and ") : "";
}
function priceWords() {
  const used = [...new Set(D.gpu)], example = used.some(gpu => D.prices[gpu] && D.prices[gpu].example && D.prices[gpu].usd === S.prices[gpu]);
  $("price-words").textContent = "Per GPU and hour: " + used.map(gpu => `${gpu} ${known(S.prices[gpu]) ? "$" + S.prices[gpu] : "no price"}`).join(", ") +
    (example ? " (examples, no quotes)" : "");
}
function answer() {
  const kept = keeping(), words = promises(), found = best(kept, S.objective), line = $("headline");
  const bold = text => Object.assign(document.createElement("b"), {textContent: text});
  const what = D.kind === "plan" ? "fleets" : "points";
  line.replaceChildren(bold(`${kept.length} of ${DONE.length} ${what}`), words ? ` keep ${words}. ` : " were run; no promise is set. ");
  const point = found ?? DONE.reduce((a, b) => excess(b) < excess(a) ? b : a, DONE[0]);
  if (found !== null) {
    line.append(`Best by ${label(S.objective).replace(/^(Output|Requests|Prompt)/, w => w.toLowerCase())}: `, bold(named(found)),
      ` with ${shown(S.objective, value(S.objective, found))}. ` + doubts(found));
  } else if (DONE.length) {
    line.append("The nearest is ", bold(named(point)), ": " + broken(point).join(", ") + ". " + doubts(point));
  }
  $("show-best").onclick = () => { select(point, true); if (narrow()) $("point").scrollIntoView({behavior: "smooth"}); };
  $("show-best").hidden = S.selected === null || point === S.selected;
  $("show-best").textContent = found !== null ? "Show it" : "Show the nearest";
  $("said").textContent = line.textContent;
  $("limits-source").textContent = D.limits_moved ? "" : `These limits are ${D.limits_source}. Move them below.`;
  return point;
}

// What must be drawn again, and whether the promises, the front or the choice moved. Pictures out of sight wait.
const stale = new Set(), seen = new Set();
let pending = null, timer = 0;
function soon(more) {
  if (!pending) requestAnimationFrame(refresh);
  pending = {more: more || (pending && pending.more)};
}
function changed() { D.limits_moved = true; verdicts = []; price(); soon(true); }
function refresh() {
  const more = pending ? pending.more : true;
  pending = null;
  const point = answer();
  priceWords();
  const first = S.selected === null;
  if (first) S.selected = point;
  showPoint();
  if (more || first) stale.add("front").add("money");
  else if (!stale.has("front")) moveFrame();
  stale.add("slices").add("heat").add("every");
  // A slider that moves gets its words at once and the pictures when it rests.
  clearTimeout(timer);
  timer = setTimeout(drawStale, first ? 0 : 60);
}
const DRAW = {front: frontAndTable, slices: drawSlices, heat: drawHeat, money: moneyAndTable, every: allPoints};
function drawStale(all) {
  for (const name of Object.keys(DRAW)) {
    if ($(name).hidden || !stale.has(name) || !(all === true || seen.has(name))) continue;
    stale.delete(name);
    DRAW[name]();
  }
}
function frontAndTable() {
  const edge = drawFront();
  table("front-table", [[null, "Point"], [null, FIGURE[S.x].label], [null, FIGURE[S.y].label], [null, "Settings"]],
    edge.slice(0, 60).map(i => [i, shown(S.x, value(S.x, i)), shown(S.y, value(S.y, i)), named(i) + (doubtful(i).length ? " (not certain)" : "")]));
  $("front-count").textContent = edge.length === 1 ? "The one point on the front" : `The ${edge.length} points on the front`;
}
function moneyAndTable() {
  table("money-table", [[null, "Point"], [null, "Capacity"], [null, "$ per hour"], [null, "Configuration"]],
    drawMoney().slice(0, 12).map(c => [c.point, (c.open ? "≥ " : "") + fmt(c.load), "$" + c.usd.toFixed(2),
      named(c.point, D.load) + (c.load > 0 && doubtful(c.point).length ? " (not certain)" : "")]));
}

function start() {
  S.objective = D.objective;
  priceControls(); price();
  if (!D.load && !D.figure.capacity) $("money").hidden = true;
  if (D.kind === "plan") $("money-words").textContent = "The highest load that each fleet holds, against what it costs.";
  limitControls(); knobControls();
  if (!priced() && S.objective.startsWith("usd")) S.objective = "output_throughput_per_gpu";
  const judged = figuresShown(true), every = figuresShown(false), first = (...keys) => keys.find(key => judged.some(([k]) => k === key)) || judged[0][0];
  S.x = first("p95_ttft_ms", "mean_ttft_ms"); S.y = first(S.objective === S.x ? "output_throughput" : S.objective);
  S.metric = S.x; S.heat.metric = S.x;
  options("objective", judged, S.objective, v => { S.objective = v; soon(true); });
  options("front-x", judged, S.x, v => { S.x = v; soon(true); });
  options("front-y", judged, S.y, v => { S.y = v; soon(true); });
  options("slice-y", every, S.metric, v => { S.metric = v; soon(false); });
  $("saturated").onchange = () => { S.saturatedMisses = $("saturated").checked; changed(); };
  if (!D.words.load) $("saturated").closest("label").hidden = true;
  const many = D.knobs.filter(k => k.values.length > 1);
  if (many.length < 2) $("heat").hidden = true;
  else {
    [S.heat.y, S.heat.x] = D.pairs.length ? D.pairs[0].keys : [many[0].key, many[1].key];
    const put = () => {
      for (const axis of ["x", "y"]) {
        options("heat-" + axis, many.map(k => [k.key, k.label]), S.heat[axis], v => {
          const other = axis === "x" ? "y" : "x";
          if (S.heat[other] === v) S.heat[other] = S.heat[axis];
          S.heat[axis] = v; put(); soon(false);
        });
      }
    };
    put();
    options("heat-z", every, S.heat.metric, v => { S.heat.metric = v; soon(false); });
    S.heat.others = D.grid ? "same" : "best";
    options("heat-others", [["same", "as in the chosen point"], ["best", "the best of them"]], S.heat.others, v => { S.heat.others = v; soon(false); });
    $("heat-pairs").replaceChildren(...D.pairs.map(pair => {
      const button = Object.assign(document.createElement("button"), {textContent: pair.name, type: "button"});
      button.onclick = () => { [S.heat.y, S.heat.x] = pair.keys; put(); soon(false); };
      return button;
    }));
  }
  $("every").ontoggle = allPoints;
  new IntersectionObserver(seen => { $("bar").hidden = seen[0].isIntersecting || seen[0].boundingClientRect.top > 0; }).observe($("point"));
  $("bar-show").onclick = () => { $("point").scrollIntoView({behavior: "smooth"}); $("point").focus({preventScroll: true}); };
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.onclick = async () => {
      await navigator.clipboard.writeText($(button.dataset.copy).textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    };
  }
  const asked = ALL.find(i => "#" + D.number[i] === location.hash);
  if (asked !== undefined) S.selected = asked;
  addEventListener("hashchange", () => { const i = ALL.find(j => "#" + D.number[j] === location.hash); if (i !== undefined) select(i); });
  nightly.addEventListener("change", () => soon(true));
  // On paper nothing can be unfolded.
  let folded = [];
  beforePaper = () => {
    drawStale(true);
    folded = [...document.querySelectorAll("#front details:not([open]), #money details:not([open])")];
    for (const box of folded) box.open = true;
  };
  addEventListener("afterprint", () => {
    for (const box of folded) box.open = false;
    soon(true);
  });
  const near = new IntersectionObserver(entries => {
    for (const entry of entries) seen[entry.isIntersecting ? "add" : "delete"](entry.target.id);
    drawStale();
  }, {rootMargin: "1200px"});
  for (const name of Object.keys(DRAW)) near.observe($(name));
  let wide = narrow();
  addEventListener("resize", () => { if (narrow() !== wide) { wide = narrow(); soon(true); } });
  refresh();
}
start();
