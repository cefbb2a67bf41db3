"use strict";
// Tables of points: the way to each of them without a pointer.
function table(id, head, rows, changedSort) {
  const box = $(id), top = document.createElement("tr");
  head.forEach(([key, text]) => {
    const th = document.createElement("th");
    th.scope = "col";
    if (changedSort && key) {
      const button = Object.assign(document.createElement("button"), {textContent: text + (sorted.key === key ? (sorted.up ? " ▲" : " ▼") : "")});
      button.onclick = () => changedSort(key);
      th.setAttribute("aria-sort", sorted.key !== key ? "none" : sorted.up ? "ascending" : "descending");
      th.append(button);
    } else th.textContent = text;
    top.append(th);
  });
  const body = rows.map(([i, ...cells]) => {
    const tr = document.createElement("tr");
    if (i === S.selected) tr.className = "chosen";
    const first = document.createElement("td"), button = document.createElement("button");
    button.className = "link"; button.textContent = "#" + D.number[i];
    button.setAttribute("aria-label", `Choose point ${D.number[i]}`);
    button.onclick = () => { select(i, true); $("point").scrollIntoView({block: "nearest", behavior: "smooth"}); };
    first.append(button);
    tr.append(first, ...cells.map(text => Object.assign(document.createElement("td"), {textContent: text})));
    return tr;
  });
  const thead = document.createElement("thead"), tbody = document.createElement("tbody");
  thead.append(top); tbody.append(...body);
  box.replaceChildren(thead, tbody);
}
const sorted = {key: null, up: true};
function allPoints() {
  if (!$("every").open) return;
  const keys = [...new Set([S.objective, ...figuresShown(true).map(([key]) => key).filter(key =>
    /^(p50|p95|p99)_|throughput|usd|capacity|slo_att/.test(key))])].slice(0, 12);
  const order = [...DONE];
  if (sorted.key) {
    const of = i => KNOB[sorted.key] ? at(sorted.key, i) : value(sorted.key, i) ?? Infinity;
    order.sort((a, b) => (sorted.up ? 1 : -1) * (of(a) - of(b)));
  }
  const head = [[null, "Point"], ...D.knobs.map(k => [k.key, k.label]), [null, "Promises"], ...keys.map(k => [k, FIGURE[k].label])];
  table("every-table", head, order.map(i => [i, ...D.knobs.map(k => knobText(k.key, at(k.key, i))),
    mark(i), ...keys.map(k => shown(k, value(k, i)))]),
    key => { sorted.up = sorted.key === key ? !sorted.up : true; sorted.key = key; allPoints(); });
}
