"use strict";
// The points as numbers: which keep the promises, which are on a front, which is nearest. No page here.
const D = JSON.parse(document.getElementById("data").textContent);
const ALL = D.number.map((_, i) => i);
const DONE = ALL.filter(i => !D.error[i]);
const KNOB = Object.fromEntries(D.knobs.map(k => [k.key, k]));
const FIGURE = Object.fromEntries(D.figures.map(f => [f.key, f]));
const LATENCIES = ["ttft", "tpot", "e2el"];
const S = {
  selected: null, limits: {}, saturatedMisses: true, objective: null, prices: {},
  x: null, y: null, metric: null, heat: {x: null, y: null, metric: null, others: "same"},
};

function value(key, i) { const column = D.figure[key]; return column ? column[i] : null; }
function known(v) { return v !== null && v !== undefined && Number.isFinite(v); }

function price() {
  const hour = [], million = [];
  for (const i of ALL) {
    const usd = S.prices[D.gpu[i]], gpus = value("num_gpus", i);
    hour[i] = known(usd) && known(gpus) ? usd * gpus : null;
    const rate = value("output_throughput", i);
    million[i] = known(hour[i]) && rate > 0 ? hour[i] / (rate * 3600) * 1e6 : null;
  }
  D.figure.usd_per_hour = hour;
  D.figure.usd_per_million_output_tokens = million;
}

// The promises that a point breaks, in words; none where it keeps all. Remembered until the limits change.
let verdicts = [];
function broken(i) { return verdicts[i] ??= breaks(i); }
function breaks(i) {
  const found = [];
  if (D.error[i]) return ["failed: " + D.error[i]];
  for (const metric of LATENCIES) {
    const limit = S.limits[metric];
    if (!limit || !known(limit.ms)) continue;
    const key = `${limit.statistic}_${metric}_ms`, v = value(key, i);
    if (!known(v)) found.push(`cannot judge ${label(key)}: it has none`);
    else if (v > limit.ms + 1e-6) found.push(`${label(key)} ${fmt(v)} is over ${fmt(limit.ms)}`);
  }
  const failed = value("failed", i);
  if (failed > 0) found.push(`${fmt(failed)} requests failed`);
  if (S.saturatedMisses && ((D.words.load || [])[i] || "").includes("saturated")) found.push("saturated: its queue keeps growing");
  return found;
}
function ends(key, i) {
  const found = (D.interval[key] || [])[i], own = value(key, i);
  if (!found || !known(own)) return "";
  const [low, high] = found.map((v, n) => known(v) ? v : n ? Infinity : 0);
  const words = v => fmt(FIGURE[key].unit === "%" ? v * 100 : v);
  // Beside saturation an interval has no end worth a number.
  return `${low < own / 10 ? "<" : ""}${words(Math.max(low, own / 10))} to ${high > own * 10 ? ">" : ""}${words(Math.min(high, own * 10))}`;
}
// Limits within the 95 % interval of a point's figure, in words: another run might be on their other side.
function doubts(i) {
  const words = doubtful(i).map(key => `${label(key)}, ${ends(key, i)} ms,`);
  if (!words.length) return "";
  return words.length === 1 ? `Not certain: the 95% interval of ${words[0]} contains the limit.`
    : `Not certain: the 95% intervals of ${words.join(" and of ")} contain the limits.`;
}
function doubtful(i) {
  const found = [];
  for (const metric of LATENCIES) {
    const limit = S.limits[metric];
    if (!limit || !known(limit.ms)) continue;
    const key = `${limit.statistic}_${metric}_ms`, interval = (D.interval[key] || [])[i];
    if (!interval || interval[0] > limit.ms || (known(interval[1]) && interval[1] <= limit.ms)) continue;
    found.push(key);
  }
  return found;
}
function mark(i) { return (broken(i).length ? "✗" : "✓") + (doubtful(i).length ? " not certain" : ""); }
function keeping() { return DONE.filter(i => !broken(i).length); }

// How far beyond its limits, as a factor of the worst; 1 and below keeps all.
function excess(i) {
  let worst = 0;
  for (const metric of LATENCIES) {
    const limit = S.limits[metric];
    if (!limit || !known(limit.ms)) continue;
    const v = value(`${limit.statistic}_${metric}_ms`, i);
    worst = Math.max(worst, known(v) ? v / limit.ms : Infinity);
  }
  return worst;
}
function better(key) { return FIGURE[key].better || -1; }
function best(points, key) {
  let found = null;
  for (const i of points) {
    const v = value(key, i);
    if (known(v) && (found === null || better(key) * (v - value(key, found)) > 0)) found = i;
  }
  return found;
}
// Points that no other beats in both figures, in order of x.
function front(points, x, y) {
  const have = points.filter(i => known(value(x, i)) && known(value(y, i)));
  have.sort((a, b) => better(x) * (value(x, b) - value(x, a)) || better(y) * (value(y, b) - value(y, a)));
  const kept = [];
  let top = -Infinity;
  for (const i of have) {
    const v = better(y) * value(y, i);
    if (v > top) { kept.push(i); top = v; }
  }
  return kept;
}

function at(key, i) { return D.knob[key][i]; }
function sameBut(i, ...keys) {
  return DONE.filter(j => D.knobs.every(k => keys.includes(k.key) || at(k.key, j) === at(k.key, i)));
}
// The point with this knob at this value that is nearest in the others; exact tells whether they are all the same.
function nearest(i, key, index) {
  let found = i, least = Infinity;
  for (const j of ALL) {
    if (at(key, j) !== index) continue;
    let distance = 0;
    for (const k of D.knobs) {
      if (k.key !== key) distance += Math.abs(at(k.key, j) - at(k.key, i)) / Math.max(k.values.length - 1, 1);
    }
    if (distance < least - 1e-12) { least = distance; found = j; }
  }
  return {point: found, exact: least === 0};
}

// Per configuration (all knobs but the load): the highest load up to which every swept load keeps the promises.
function capacities() {
  const out = [], groups = new Map();
  if (D.figure.capacity) {
    for (const i of DONE) {
      if (known(value("capacity", i))) out.push({point: i, load: value("capacity", i), open: false, usd: value("usd_per_hour", i)});
    }
    return out;
  }
  if (!D.load) return out;
  for (const i of ALL) {
    const key = D.knobs.filter(k => k.key !== D.load).map(k => at(k.key, i)).join(",");
    groups.set(key, [...(groups.get(key) || []), i]);
  }
  for (const points of groups.values()) {
    points.sort((a, b) => at(D.load, a) - at(D.load, b));
    let last = null, n = 0;
    while (n < points.length && !broken(points[n]).length) last = points[n++];
    const load = last === null ? 0 : KNOB[D.load].values[at(D.load, last)];
    out.push({point: last === null ? points[0] : last, load, open: n === points.length, usd: value("usd_per_hour", points[0])});
  }
  return out;
}

function label(key) { return FIGURE[key] ? FIGURE[key].label.replace(/ \(ms\)$/, "") : key; }
function fmt(v) {
  if (!known(v)) return "–";
  const size = Math.abs(v);
  if (size >= 1000) return v.toLocaleString("en-US", {maximumFractionDigits: 0});
  return String(Number(v.toPrecision(size >= 100 ? 4 : 3)));
}
function shown(key, v) {
  if (!known(v)) return "–";
  const unit = FIGURE[key].unit;
  if (unit === "%") return (v > 0 && v < 0.001 ? "under 0.1" : fmt(v * 100)) + " %";
  if (unit === "$") return "$" + (v < 100 ? v.toFixed(2) : fmt(v));
  return fmt(v) + (unit ? " " + unit : "");
}
function knobText(key, index) {
  const v = KNOB[key].values[index];
  return v === null ? "default" : typeof v === "number" ? String(Number(v.toPrecision(6))) : String(v);
}
function phrase(k, i) { return k.phrase.replace("{}", knobText(k.key, at(k.key, i))); }
// Names before numbers: h100 · 30 req/s · batch 256.
const INORDER = [...D.knobs.filter(k => !k.numeric), ...D.knobs.filter(k => k.numeric)];
function named(i, without) {
  const label = (D.words.label || [])[i], words = INORDER.filter(k => k.key !== without).map(k => phrase(k, i)).join(" · ");
  return !label ? words : D.kind === "plan" ? label : `${label}: ${words}`;
}
