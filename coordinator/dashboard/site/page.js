"use strict";
// Draws what the coordinator says of a run. Figures and words come ready; nothing that a node chose is
// ever put in as markup: all text goes in by textContent.

const byId = (id) => document.getElementById(id);

function element(tag, { text, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== "") made.setAttribute(name, value);
  }
  if (text !== undefined) made.textContent = text;
  made.append(...children);
  return made;
}

const SVG = "http://www.w3.org/2000/svg";
function drawn(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const percent = (share) => `${Math.round(100 * share)} %`;

// ---- the run ----

let counted = "tokens"; // or "samples"

function showRun(run) {
  counted = run.counted;
  for (const place of document.querySelectorAll("[data-counted]")) place.textContent = counted + place.dataset.counted;
  document.title = `${run.name}: round ${run.round} of ${run.total}`;
  byId("name").textContent = run.name;
  const phase = byId("phase");
  phase.textContent = run.phase;
  phase.className = `pill ${run.phase}`;
  if (byId("sentence").textContent !== run.sentence) byId("sentence").textContent = run.sentence;
  byId("reason").textContent = run.reason;
  const progress = byId("progress");
  progress.setAttribute("aria-valuemax", run.total);
  progress.setAttribute("aria-valuenow", run.committed);
  progress.firstElementChild.style.width = `${run.total ? (100 * run.committed) / run.total : 0}%`;
  // Read out to who cannot see it, so not each second: the sentence has seconds that run down.
  const told = [...byId("trouble").children].map((line) => line.textContent);
  if (told.join("\n") !== run.trouble.join("\n")) byId("trouble").replaceChildren(...run.trouble.map((text) => element("li", { text })));
  byId("digest").textContent = `Outer state ${run.digest}.`;
  byId("backup").textContent = run.backup ? `Backup: ${run.backup}.` : "";
  byId("rules").textContent = run.rules.length ? `Rules changed: ${run.rules.join("; ")}.` : "";
  const cards = [
    ["training loss", run.loss ?? "-", run.hasOwnLoss ? "mean of the nodes" : "mean of the nodes, nats a token"],
    ["held-out loss", run.heldOutNow ?? "-", heldOutWords(run)],
    [counted, run.tokens, `${run.tokensPerSecond} a second`],
    ["computing", run.computing === null ? "-" : percent(run.computing), run.time || "of the nodes' time"],
    ["sent by all nodes", run.sent, run.timesLess ? `${run.timesLess} times less than all-reduce` : "to peers and to the coordinator"],
    ["time left", run.left || (run.phase === "finished" ? "none" : "-"), `${run.isStanding && run.left ? "once it goes on; " : ""}${run.elapsed} so far`],
    ["nodes ready", `${run.ready} of ${run.present}`, `${run.parameters} parameters`],
  ];
  byId("cards").replaceChildren(...cards.map(([name, value, more]) =>
    element("div", { class: "card" }, element("h3", { text: name }),
      element("div", { class: "value", text: value }), element("div", { class: "more", text: more }))));
}

function heldOutWords(run) {
  if (run.heldOutNow === null) return "not measured yet";
  const bits = run.bitsPerByte === null ? "" : `; ${run.bitsPerByte.toFixed(3)} bits a byte`;
  return `from ${run.heldOutFirst}${bits}`;
}

// ---- the nodes ----

const PARTS = ["compute", "local links", "exchange", "waiting"];

function shareBar(shares, words) {
  const bar = element("div", { class: "bar", role: "img", "aria-label": words, title: words });
  (shares || []).forEach((share, place) => {
    const part = element("i", { class: `s${place}`, title: `${PARTS[place]} ${percent(share || 0)}` });
    part.style.width = `${100 * (share || 0)}%`;
    bar.append(part);
  });
  return bar;
}

function nodeRow(node) {
  const cell = (label, text, isNumber) =>
    element("td", { text, class: isNumber ? "number" : null, "data-label": label });
  const why = [node.waitsFor, node.upload === "-" ? "" : `upload: ${node.upload}`,
    node.letGo === "-" ? "" : `late work let go: ${node.letGo}`].filter(Boolean).join("; ");
  return element("tr", { "data-node": node.name },
    element("td", { class: "wide" }, element("span", { class: `dot ${node.tone}` }),
      element("strong", { text: node.name }),
      element("span", { class: `state ${node.tone}`, text: `${node.state} · ${node.device}` })),
    element("td", { class: "wide" }, element("span", { text: node.does }),
      element("div", { class: "why", text: why })),
    element("td", { class: "wide" }, shareBar(node.shares, node.time)),
    cell("loss", node.loss, true), cell(`${counted}/s`, node.tokensPerSecond, true),
    cell("sent", node.sent, true), cell("received", node.received, true),
    cell("link", node.link), cell("screened", node.screened), cell("heard", node.heard, true));
}

const MOST_ROWS = 40;  // of more a page is long, and those that need somebody stand first
let showsAllNodes = false;

function showNodes(view) {
  const shown = showsAllNodes ? view.nodes : view.nodes.slice(0, MOST_ROWS);
  const hidden = view.nodes.length + view.moreNodes - shown.length;
  byId("node-rows").replaceChildren(...shown.map(nodeRow));
  byId("more-nodes").textContent = hidden ? `and ${hidden} more` : "";
  byId("all-nodes").hidden = view.nodes.length <= MOST_ROWS;
  byId("all-nodes").textContent = showsAllNodes ? "show fewer" : "show all";
}

// ---- the latest rounds ----

function lane(node, seconds, committed, isOpen) {
  const track = element("div", { class: "track" });
  const piece = (from, to, kind) => {
    if (from === null || to === null || to < from) return;
    const part = element("i", { class: kind });
    part.style.left = `${(100 * from) / seconds}%`;
    part.style.width = `${Math.max(0.4, (100 * (to - from)) / seconds)}%`;
    track.append(part);
  };
  const now = isOpen ? seconds : null;
  if (node.trained === null && node.applied === null && !isOpen) track.append(element("i", { class: "never" }));
  piece(0, node.trained ?? now, "train");
  piece(node.trained, node.held ?? committed ?? now, "exchange");
  piece(committed, node.applied ?? now, "apply");
  if (committed !== null) {
    const line = element("i", { class: "commit" });
    line.style.left = `${(100 * committed) / seconds}%`;
    track.append(line);
  }
  const never = isOpen ? "not yet" : "never";
  const said = (at, words) => (at === null ? `${never} ${words}` : `${words} after ${at} s`);
  const words = [said(node.trained, "trained"), node.reduced === null ? "" : said(node.reduced, "reduced"),
    said(node.held, "held all results"), said(node.applied, "applied")].filter(Boolean).join(", ");
  track.title = words;
  track.setAttribute("role", "img");
  track.setAttribute("aria-label", `${node.name} ${words}`);
  return element("div", { class: "lane" }, element("b", { text: node.name, title: node.name }), track);
}

function showTimeline(times) {
  byId("no-timeline").hidden = times.length > 0;
  byId("timeline").replaceChildren(...times.map((round) => {
    const seconds = Math.max(round.seconds, 0.01);
    const how = round.isOpen ? `in flight for ${round.seconds} s` : `${round.seconds} s`;
    const words = [how, round.waitedFor, round.reason].filter(Boolean).join("; ");
    return element("div", { class: "round" },
      element("h3", { text: `Round ${round.round} ` }, element("span", { text: words })),
      ...round.nodes.map((node) => lane(node, seconds, round.committed, round.isOpen)));
  }));
}

// ---- who reaches whom ----

const MOST_DRAWN = 40;
const MOST_NAMED = 14;  // of more, whose names would lie over each other, those that are not reached

function showMap(view) {
  const nodes = view.nodes.filter((node) => !["lost", "left", "expelled", "quarantined", "unapproved"].includes(node.state));
  byId("map-words").textContent = !nodes.length ? "No node is here." : nodes.length < 2 ? "One node has nobody to reach."
    : view.run.reach ? `${view.run.reach}.` : "All nodes reach each other.";
  if (nodes.length < 2 || nodes.length > MOST_DRAWN) return byId("map").replaceChildren();
  const svg = drawn("svg", { viewBox: "0 0 400 260", role: "img", "aria-label": byId("map-words").textContent });
  const place = new Map(nodes.map((node, index) => {
    const angle = (2 * Math.PI * index) / nodes.length - Math.PI / 2;
    return [node.id, [200 + 130 * Math.cos(angle), 130 + 95 * Math.sin(angle), node]];
  }));
  const isCut = new Set(view.cutPairs.map((pair) => pair.join()));
  const ids = nodes.map((node) => node.id).sort();
  ids.forEach((one, index) => ids.slice(index + 1).forEach((two) => {
    const [x1, y1] = place.get(one), [x2, y2] = place.get(two);
    svg.append(drawn("line", { x1, y1, x2, y2, class: isCut.has(`${one},${two}`) ? "cut" : "" }));
  }));
  const isNamed = new Set(nodes.length > MOST_NAMED ? view.cutPairs.flat() : ids);
  for (const [x, y, node] of place.values()) {
    const fill = colour(`--${node.tone}`);
    const mark = node.isHelper ? drawn("rect", { x: x - 7, y: y - 7, width: 14, height: 14, rx: 3, fill })
      : drawn("circle", { cx: x, cy: y, r: 6, fill });
    mark.append(drawn("title", {}, node.name));
    svg.append(mark);
    if (!isNamed.has(node.id)) continue;
    const name = node.name.length > 16 ? `${node.name.slice(0, 15)}…` : node.name;
    const left = x < 195, middle = Math.abs(x - 200) < 5;
    svg.append(drawn("text", { x: x + (middle ? 0 : left ? -10 : 10), y: y + (middle ? (y < 130 ? -10 : 20) : 4),
      "text-anchor": middle ? "middle" : left ? "end" : "start" }, name));
  }
  byId("map").replaceChildren(svg);
}

// ---- contributions ----

const MOST_ON_BOARD = 20;

function showBoard(nodes) {
  const gave = nodes.filter((node) => node.committedTokens > 0).sort((a, b) => b.committedTokens - a.committedTokens);
  const most = gave.length ? gave[0].committedTokens : 1;
  const tokensOf = (some) => some.reduce((sum, node) => sum + node.committedTokens, 0);
  const rest = gave.slice(MOST_ON_BOARD);
  const more = rest.length ? [element("li", { class: "quiet rest",
    text: `and ${rest.length} more, who gave ${percent(tokensOf(rest) / tokensOf(gave))} of the ${counted}` })] : [];
  byId("board").replaceChildren(...gave.slice(0, MOST_ON_BOARD).map((node) => {
    const part = element("span", { class: "part" });
    part.style.width = `${(100 * node.committedTokens) / most}%`;
    const share = node.workShare === null ? "" : `, weighs ${percent(node.workShare)}`;
    return element("li", {}, element("span", { text: node.name }), part,
      element("span", { class: "share", text: `${node.committed} ${counted}${share}` }));
  }), ...more);
}

// ---- news and closed rounds ----

const clock = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" });

function showNews(lines) {
  byId("news").replaceChildren(...lines.map((line) => {
    const at = new Date(1000 * line.at);
    return element("li", {}, element("time", { datetime: at.toISOString(), text: clock.format(at) }),
      element("span", { class: line.level, text: line.text }));
  }));
}

function showWritten(all) {
  byId("texts").hidden = !all.length;
  byId("written").replaceChildren(...all.map((written) => element("div", { class: "written" },
    element("h3", { text: `after round ${written.round}${written.node ? `, on ${written.node}` : ""}` }),
    ...(written.whyNot ? [element("p", { class: "quiet", text: `none: ${written.whyNot}` })]
      : written.texts.map((one) => element("p", {}, element("b", { text: one.prompt }), one.text))))));
}

function showRounds(rounds) {
  const number = (text) => element("td", { class: "number", text });
  byId("round-rows").replaceChildren(...rounds.map((closed) =>
    element("tr", { class: closed.tone }, number(closed.round), element("td", { text: closed.nodes }),
      element("td", { text: closed.slices }), number(closed.tokens), number(closed.sent), number(closed.took),
      number(closed.loss), element("td", { text: closed.digest }), element("td", { text: closed.screened }),
      element("td", { text: closed.reason }))));
}

// ---- the curves ----

let history = null, plot = null, axis = "rounds", drawnTo = null;

function curveData() {
  const at = new Map(history.rounds.map((round, place) => [round, history[axis][place]]));
  const points = new Map();
  history.rounds.forEach((round, place) => points.set(history[axis][place], [history.loss[place], null]));
  history.heldRounds.forEach((round, place) => {
    const x = at.get(round) ?? between(round);
    if (x === undefined) return;
    points.set(x, [points.get(x)?.[0] ?? null, history.heldLoss[place]]);
  });
  const sorted = [...points.entries()].sort((a, b) => a[0] - b[0]);
  return [sorted.map(([x]) => x), sorted.map(([, y]) => y[0]), sorted.map(([, y]) => y[1])];
}

function between(round) {
  if (axis === "rounds") return round;
  const next = history.rounds.findIndex((kept) => kept > round);
  if (next < 0) return history[axis][history[axis].length - 1];
  if (next === 0) return round ? (history[axis][0] * round) / history.rounds[0] : 0;
  const [before, after] = [history.rounds[next - 1], history.rounds[next]];
  const part = (round - before) / (after - before);
  return history[axis][next - 1] + part * (history[axis][next] - history[axis][next - 1]);
}

const WHOLE_STEPS = [0, 1, 2, 3, 4, 5, 6, 7].flatMap((power) => [1, 2, 5].map((step) => step * 10 ** power));
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const inWords = {
  rounds: (value) => String(value), tokens: (value) => SHORT.format(value),
  seconds: (value) => (value >= 7200 ? `${(value / 3600).toFixed(1)} h` : value >= 120 ? `${(value / 60).toFixed(0)} min` : `${value.toFixed(0)} s`),
};

function drawCurve() {
  if (!history) return;
  const data = curveData();
  byId("no-curve").hidden = data[0].length > 0;
  if (!data[0].length) return;
  const place = byId("curve");
  if (plot) plot.destroy();
  const line = { stroke: colour("--line"), width: 1 };
  const ink = { stroke: colour("--quiet"), grid: line, ticks: line };
  const few = data[0].length < 3;
  plot = new uPlot({
    width: place.clientWidth, height: place.clientWidth < 500 ? 220 : 320,
    scales: { x: { time: false } },
    series: [
      { label: axis === "seconds" ? "time" : axis, value: (_, value) => (value === null ? "-" : inWords[axis](value)) },
      { label: "training loss", stroke: colour("--s0"), width: 1.5, spanGaps: true, points: { show: few } },
      { label: "held-out loss", stroke: colour("--held"), width: 2, spanGaps: true, points: { show: data[2].filter((y) => y !== null).length < 60 } },
    ],
    axes: [{ ...ink, incrs: axis === "rounds" ? WHOLE_STEPS : undefined, values: (_, values) => values.map((value) => inWords[axis](value)) }, { ...ink, size: 56 }],
  }, data, place);
}

async function fetchHistory(stamp) {
  if (stamp === drawnTo) return;
  drawnTo = stamp;
  try {
    history = await (await fetch("history")).json();
    drawCurve();
  } catch { drawnTo = null; }  // the next picture asks again
}

// ---- what people do ----

byId("axis").addEventListener("click", (event) => {
  const chosen = event.target.dataset.axis;
  if (!chosen) return;
  axis = chosen;
  for (const button of byId("axis").children) button.setAttribute("aria-pressed", button.dataset.axis === axis);
  drawCurve();
});

let showsAllNews = false;
byId("older").addEventListener("click", async () => {
  showsAllNews = !showsAllNews;
  byId("older").textContent = showsAllNews ? "show the latest" : "show all that is kept";
  if (showsAllNews) showNews(await (await fetch("news")).json());
  else if (latest) showNews(latest.news);
});

byId("all-nodes").addEventListener("click", () => {
  showsAllNodes = !showsAllNodes;
  if (latest) showNodes(latest);
});

let showsAllTexts = false, textsOf = null;
byId("older-texts").addEventListener("click", async () => {
  showsAllTexts = !showsAllTexts;
  byId("older-texts").textContent = showsAllTexts ? "show the latest" : "show all that is kept";
  if (showsAllTexts) showWritten(await (await fetch("written")).json());
  else if (latest) showWritten([latest.run.written]);
});

function hideBoard(isHidden) {
  byId("board").hidden = isHidden;
  byId("hide-board").textContent = isHidden ? "show" : "hide";
  byId("hide-board").setAttribute("aria-expanded", !isHidden);
}
byId("hide-board").addEventListener("click", () => {
  const isHidden = !byId("board").hidden;
  localStorage.setItem("atoll-board-hidden", isHidden ? "yes" : "");
  hideBoard(isHidden);
});
hideBoard(localStorage.getItem("atoll-board-hidden") === "yes");

new ResizeObserver(() => plot && plot.setSize({ width: byId("curve").clientWidth, height: plot.height })).observe(byId("curve"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawCurve(); if (latest) showMap(latest); });

// ---- live ----

let latest = null, heardAt = 0;

function show(view) {
  latest = view;
  heardAt = Date.now();
  showRun(view.run);
  showNodes(view);
  showTimeline(view.times);
  showMap(view);
  showBoard(view.nodes);
  if (!showsAllNews) showNews(view.news);
  // Put in anew only when it is new, so that what somebody has marked stays marked.
  if (!showsAllTexts && view.run.written?.round !== textsOf) showWritten(view.run.written ? [view.run.written] : []);
  textsOf = view.run.written?.round ?? null;
  showRounds(view.rounds);
  fetchHistory(view.curves);
}

function sayLive(text, isAway) {
  const live = byId("live");
  if (live.textContent !== text) live.textContent = text;
  live.classList.toggle("away", isAway);
}

function listen() {
  const events = new EventSource("live");
  events.onmessage = (event) => { show(JSON.parse(event.data)); sayLive("live", false); };
  events.onerror = () => {
    sayLive(heardAt ? `the coordinator is away since ${clock.format(new Date(heardAt))}; asking again …` : "no answer; asking again …", true);
    // A browser gives a stream up for good when it is refused: then a new one is tried.
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
  };
}
listen();
