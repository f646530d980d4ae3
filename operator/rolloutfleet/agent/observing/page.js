"use strict";
// Reads samples.json every 2 seconds. What samples say is shown as text alone: nodes are made here, never parsed.
const POLL = 2000, TIMEOUT = 5000, KEPT = 24;
const HUES = [212, 32, 150, 330, 82, 268, 0, 182, 56, 300];
const PROBABILITIES = [[0.9, "p0", "likely: ≥ 90 %"], [0.5, "p1", "≥ 50 %"], [0.1, "p2", "≥ 10 %"], [0.01, "p3", "≥ 1 %"], [0, "p4", "unlikely: < 1 %"]];
const STATUS = {completed: "good", truncated: "warn", aborted: "warn", pending: "warn", failed: "bad"};
const QUEUE = {open: "groups in work", running: "requests", finished: "groups that wait for a step", leased: "groups of steps without checkpoint"};
const cards = new Map();
let run = "", number = 0, paused = false, answered = 0, timer = 0, shown = null;

const $ = (id) => document.getElementById(id);
const el = (tag, properties, ...children) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};
const svg = (tag, attributes, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const short = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 3});
const count = new Intl.NumberFormat("en");
const decimal = (value, digits = 3) => value === null ? "–" : String(+value.toFixed(digits));
const percent = (value) => value === null ? "–" : `${decimal(value * 100, 1)} %`;

function tiles(view) {
  const {rates, throughput} = view, last = view.steps.at(-1);
  const figures = [
    ["Tokens a second", short.format(throughput.tokens_per_second)],
    ["Samples a second", short.format(throughput.samples_per_second)],
    ["Groups finished", short.format(view.groups)],
    ["Reward", last ? decimal(last.reward_mean) : "–", last && `step ${last.step}`],
    ["Passed", last ? percent(last.pass_rate) : "–", last && `≥ ${view.pass_reward}`],
    ["Staleness", last ? decimal(last.staleness_mean, 2) : "–", last && `max ${last.staleness_max}`],
    ["Groups of one reward", percent(rates.zero_variance)],
    ["Truncated", percent(rates.truncated)],
    ["Repetitive", percent(rates.repetitive)],
    ["Failed", percent(rates.failed)],
    ["Prefix cache hits", percent(rates.prefix_cache_hit)],
  ];
  if (rates.spec_accepted !== null)
    figures.push(["Drafts accepted", percent(rates.spec_accepted), `${decimal(rates.spec_accept_length, 2)} a check`]);
  $("tiles").replaceChildren(...figures.map(([name, value, note]) =>
    el("div", {}, el("dt", {textContent: name}), el("dd", {textContent: value}, note ? el("small", {textContent: note}) : null))));
}

// Charts, drawn in pixels of the place that they have.
function frame(id, low, high, label) {
  const place = $(id), width = Math.max(place.clientWidth, 200), height = place.clientHeight || 150;
  const box = {left: 44, right: width - 8, top: 8, bottom: height - 22};
  const y = (value) => box.bottom - (value - low) / (high - low || 1) * (box.bottom - box.top);
  const picture = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label});
  for (const value of ticks(low, high)) {
    picture.append(svg("line", {class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value)}));
    picture.append(svg("text", {x: box.left - 8, y: y(value) + 4, "text-anchor": "end"}, short.format(value)));
  }
  place.replaceChildren(picture);
  return {picture, box, y};
}
function ticks(low, high) {
  const rough = (high - low || 1) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step / 1e6 && found.length < 12; at += step) found.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return found;
}
const nothing = (id, text) => $(id).replaceChildren(el("p", {textContent: text}));
const below = (picture, x, box, text, anchor = "middle") =>
  picture.append(svg("text", {x, y: box.bottom + 16, "text-anchor": anchor}, text));

function curve(steps) {
  const points = steps.filter((step) => step.reward_mean !== null);
  if (!points.length) return nothing("curve", "No step has had a batch with rewards yet.");
  let low = Math.min(...points.map((p) => p.reward_mean - p.reward_std));
  let high = Math.max(...points.map((p) => p.reward_mean + p.reward_std));
  if (high - low < 1e-9) [low, high] = [low - 0.5, high + 0.5];
  const last = points.at(-1);
  const {picture, box, y} = frame("curve", low, high, `Reward by step: ${decimal(last.reward_mean)} in step ${last.step}, ${points.length} steps shown`);
  const from = points[0].step, width = Math.max(last.step - from, 1);
  const x = (step) => points.length === 1 ? (box.left + box.right) / 2 : box.left + 6 + (step - from) / width * (box.right - box.left - 12);
  const path = (ends) => ends.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  const upper = points.map((p) => [p.step, p.reward_mean + p.reward_std]);
  const lower = points.map((p) => [p.step, p.reward_mean - p.reward_std]).reverse();
  picture.append(svg("polygon", {class: "area", points: path([...upper, ...lower])}));
  picture.append(svg("polyline", {class: "line", points: path(points.map((p) => [p.step, p.reward_mean]))}));
  const radius = points.length > 120 ? 2 : 3.5;
  for (const p of points) {
    const words = `step ${p.step} from version ${p.version}: reward ${decimal(p.reward_mean)} ± ${decimal(p.reward_std)}, passed ${percent(p.pass_rate)}, ` +
      `pass@n ${percent(p.pass_at_n)}, ${p.samples} samples in ${p.groups} groups (${p.zero_variance} of one reward), ${decimal(p.response_length, 0)} tokens a response, ` +
      `truncated ${percent(p.truncated)}, staleness ${decimal(p.staleness_mean, 2)}`;
    picture.append(svg("circle", {class: p.trained ? "dot trained" : "dot", cx: x(p.step), cy: y(p.reward_mean), r: radius}, svg("title", {}, words)));
  }
  below(picture, x(from), box, String(from), points.length === 1 ? "middle" : "start");
  if (points.length > 1) below(picture, x(last.step), box, `step ${last.step}`, "end");
}

function columns(id, entries, label) {
  const most = Math.max(...entries.map((entry) => entry.count), 1);
  const {picture, box, y} = frame(id, 0, most, label);
  const slot = (box.right - box.left) / entries.length, width = Math.min(slot * 0.78, 64);
  const every = Math.ceil(entries.length / Math.max(1, Math.floor((box.right - box.left) / 48)));
  entries.forEach((entry, at) => {
    const middle = box.left + slot * (at + 0.5);
    const bar = {class: "column", x: middle - width / 2, y: y(entry.count), width, height: Math.max(box.bottom - y(entry.count), entry.count ? 1 : 0), rx: 2};
    picture.append(svg("rect", bar, svg("title", {}, `${entry.words}: ${count.format(entry.count)}`)));
    if (at % every === 0) below(picture, middle, box, entry.name);
  });
}
function rewards(bars) {
  if (!bars.length) return nothing("rewards", "No group with rewards has finished yet.");
  columns("rewards", bars.map(({low, high, count: size}) => ({
    count: size, name: decimal(low, 2), words: low === high ? `reward ${decimal(low)}` : `reward ${decimal(low)} to ${decimal(high)}`,
  })), "Histogram of rewards");
}
function staleness(found) {
  const versions = Object.keys(found).map(Number);
  if (!versions.length) return nothing("staleness", "No step has had a batch yet.");
  const most = Math.min(Math.max(...versions, 4), 40), entries = [];
  for (let at = 0; at <= most; at++) {
    const size = at < most ? found[at] || 0 : versions.filter((v) => v >= most).reduce((sum, v) => sum + found[v], 0);
    entries.push({count: size, name: String(at), words: at < most ? `${at} versions` : `${at} versions or more`});
  }
  columns("staleness", entries, "Samples by staleness");
}
function throughput({series, slot_seconds: slot}) {
  if (series.length < 2) return nothing("throughput", "Measured from 10 seconds after the first sample on.");
  const {picture, box, y} = frame("throughput", 0, Math.max(...series, 1), `Tokens a second, now ${short.format(series.at(-1))}`);
  const x = (at) => box.left + at / (series.length - 1) * (box.right - box.left);
  const line = series.map((value, at) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  picture.append(svg("polygon", {class: "area", points: `${box.left},${box.bottom} ${line} ${box.right},${box.bottom}`}));
  picture.append(svg("polyline", {class: "line", points: line}));
  const ago = series.length * slot;
  below(picture, box.left, box, ago < 120 ? `${ago} s ago` : `${Math.round(ago / 60)} min ago`, "start");
  below(picture, box.right, box, "now", "end");
}
function rows(id, entries, text) {
  if (!entries.length) return nothing(id, text);
  const most = Math.max(...entries.map(([, value]) => value), 1);
  $(id).replaceChildren(...entries.map(([name, value]) => el("div", {},
    el("span", {textContent: name}), el("span", {textContent: count.format(value)}), el("meter", {min: 0, max: most, value, ariaLabel: name}))));
}

function evaluations(found) {
  $("evaluated").hidden = !found.length;
  const line = (tag, cells) => el("tr", {}, ...cells.map((text) => el(tag, {textContent: text})));
  const figures = ({name, version, reward_mean, pass_rate, pass_at_n, samples: size, failed, truncated, response_length, seconds, ago}) => line("td", [
    name, `version ${version}`, decimal(reward_mean), percent(pass_rate), percent(pass_at_n), `${count.format(size)}${failed ? `, ${count.format(failed)} failed` : ""}`,
    percent(truncated), decimal(response_length, 0), `${decimal(seconds, 1)} s`, `${decimal(ago / 60, 0)} min ago`]);
  $("evaluations").replaceChildren(
    line("th", ["Name", "Weights", "Reward", "Passed", "pass@n", "Samples", "Truncated", "Tokens", "Took", "Ended"]),
    ...[...found].reverse().map(figures));
}

// Samples
function versionOf(spans, at) {
  const span = spans.find((one) => one.start <= at && at < one.end);
  return span ? span.version : null;
}
const hueOf = (version) => HUES[version % HUES.length];

function tokens(sample) {
  const place = el("p", {className: "tokens"});
  place.setAttribute("aria-label", `${sample.response_length} response tokens`);
  let end = 0, before;
  for (const piece of sample.tokens) {
    if (piece.start > end) place.append(el("span", {className: "gap", textContent: `… ${count.format(piece.start - end)} tokens …`}));
    piece.ids.forEach((id, offset) => {
      const at = piece.start + offset, version = versionOf(sample.weight_versions, at);
      const chance = Math.exp(piece.log_probs[offset]), masked = !piece.mask[offset] || sample.removed;
      if (version !== before && (version !== null || before !== undefined))
        place.append(el("span", {className: "mark", textContent: version === null ? "not sampled" : `v${version}`}), " ");
      before = version;
      const node = el("span", {className: "t", textContent: id});
      if (version === null) node.classList.add("unsampled");
      else {
        node.classList.add(PROBABILITIES.find(([least]) => chance >= least)[1]);
        node.style.setProperty("--hue", hueOf(version));
      }
      if (masked) node.classList.add("masked");
      node.dataset.version = version === null ? "" : version;
      node.title = version === null ? `token ${id} at ${at}, not sampled by an engine`
        : `token ${id} at ${at}, version ${version}, log-prob ${piece.log_probs[offset]} (${percent(chance)})`;
      if (masked) node.title += ", masked: not trained";
      place.append(node, " ");
    });
    end = piece.start + piece.ids.length;
  }
  return place;
}

function card(sample) {
  const [epoch, group, index] = sample.id.split("/");
  const versions = [...new Set(sample.weight_versions.map((span) => span.version))];
  const facts = [
    `${count.format(sample.response_length)} tokens` + (sample.trained_tokens < sample.response_length ? `, ${count.format(sample.trained_tokens)} trained` : ""),
    `${decimal(sample.seconds, 1)} s`,
    versions.length ? `version ${versions.join(", ")}` : null,
    sample.engine || null,
    sample.attempts > 1 ? `${sample.attempts} attempts` : null,
  ].filter(Boolean);
  const flags = [
    sample.dropped ? `dropped: ${sample.dropped}` : null,
    sample.removed ? "removed: not trained" : null,
    sample.repetition > 0.5 ? `repeats itself (${percent(sample.repetition)})` : null,
  ].filter(Boolean);
  const asked = sample.prompt || sample.prompt_ids.join(" ") + (sample.prompt_length > sample.prompt_ids.length ? " …" : "");
  const node = el("article", {},
    el("header", {},
      el("span", {className: `badge ${STATUS[sample.status] || ""}`, textContent: sample.status}),
      el("h3", {textContent: `Prompt ${group}, sample ${index}` + (epoch === "0" ? "" : `, epoch ${epoch}`)}),
      el("span", {className: "reward", textContent: sample.reward === null ? (sample.dropped || sample.status === "failed" ? "no reward" : "no reward yet") : `reward ${decimal(sample.reward)}`}),
      ...facts.map((text) => el("span", {textContent: text})),
      ...flags.map((text) => el("span", {className: "badge warn", textContent: text}))),
    sample.error ? el("p", {className: "why", textContent: sample.error}) : null,
    el("details", {}, el("summary", {textContent: `Prompt, ${count.format(sample.prompt_length)} tokens`}), el("div", {className: "text prompt", textContent: asked})),
    sample.response ? el("div", {className: "text", textContent: sample.response}) : null);
  if (sample.response_length) {
    const all = el("details", {open: true}, el("summary", {textContent: "Tokens"}), tokens(sample));
    node.append(all);
  }
  node.dataset.id = sample.id;
  node.dataset.number = sample.number;
  return node;
}

function samples(found) {
  const list = $("list");
  for (const sample of [...found].reverse()) { // the oldest first, each to the top
    const old = cards.get(sample.id), node = card(sample);
    if (old) { // what the reader has opened or closed stays so
      const were = old.querySelectorAll("details");
      node.querySelectorAll("details").forEach((one, at) => { if (were[at]) one.open = were[at].open; });
      old.remove();
    }
    cards.set(sample.id, node);
    list.prepend(node);
  }
  while (list.children.length > KEPT) {
    cards.delete(list.lastElementChild.dataset.id);
    list.lastElementChild.remove();
  }
  if (!list.children.length) list.append(el("p", {className: "hint", textContent: "None yet."}));
}

function legend() {
  const place = $("legend"), colour = document.querySelector("input[name=colour]:checked").value;
  $("samples").dataset.colour = colour;
  const swatch = (name, words, hue) => {
    const node = el("span", {className: `t ${name}`, textContent: words});
    if (hue !== undefined) node.style.setProperty("--hue", hue);
    return node;
  };
  const versions = [...new Set([...document.querySelectorAll("#list .t[data-version]")].map((node) => node.dataset.version))];
  const shown = colour === "version"
    ? versions.filter(Boolean).map(Number).sort((a, b) => a - b).map((version) => swatch("", `version ${version}`, hueOf(version)))
    : PROBABILITIES.map(([, name, words]) => swatch(name, words));
  place.replaceChildren(...shown, el("span", {className: "t masked unsampled", textContent: "masked: not trained"}), el("span", {textContent: "hover over a token for more"}));
}

function show(view) {
  if (view.run !== run) { // the agent has started anew
    run = view.run;
    cards.clear();
    $("list").replaceChildren();
  }
  number = view.number;
  document.title = `Samples of ${view.server} · rolloutfleet`;
  $("whose").textContent = `${view.server} (${view.role})`;
  const any = Object.keys(view.ended).length || view.groups || view.steps.length || Object.keys(view.dropped).length || view.evaluations.length;
  $("empty").hidden = Boolean(any);
  $("main").hidden = !any;
  const prompts = view.queue ? ` ${count.format(view.queue.open)} groups are in work, with ${count.format(view.queue.running)} requests.` : " No prompt has been taken yet.";
  $("awaited").textContent = `This page waits for the first sample of RolloutServer ${view.server}, role ${view.role}, and shows it by itself.${prompts}`;
  if (!any) return;
  shown = view;
  figures(view);
  if (view.samples.length || !cards.size) {
    samples(view.samples);
    legend();
  }
}

function figures(view) {
  tiles(view);
  curve(view.steps);
  rewards(view.rewards);
  staleness(view.staleness);
  throughput(view.throughput);
  evaluations(view.evaluations);
  rows("queue", view.queue ? Object.entries(QUEUE).map(([name, words]) => [words, view.queue[name]]) : [], "Not told yet.");
  rows("drops", Object.entries(view.dropped).sort((a, b) => b[1] - a[1]), "None.");
  rows("ends", Object.entries(view.ended), "None.");
}

function state(word, name) {
  $("state").textContent = word;
  $("state").className = `pill ${name}`;
}

async function poll() {
  clearTimeout(timer);
  try {
    const answer = await fetch(`samples.json?after=${number}&limit=${KEPT}`, {cache: "no-store", signal: AbortSignal.timeout(TIMEOUT)});
    const body = await answer.json().catch(() => { throw new Error(`status ${answer.status}, and not the agent's answer`); });
    if (!answer.ok) throw new Error(body.error ? body.error.message : `status ${answer.status}`);
    if (run && body.run !== run && number) { number = 0; return void poll(); }
    show(body);
    answered = Date.now();
    $("error").hidden = true;
    document.body.classList.remove("old");
    if (!paused) state("live", "good");
  } catch (error) {
    const since = answered ? ` What you see is from ${new Date(answered).toLocaleTimeString()}.` : "";
    $("error").textContent = `The agent does not answer (${error.message}). Asked again every 2 seconds.${since}`;
    $("error").hidden = false;
    document.body.classList.add("old");
    state("no answer", "bad");
  }
  if (!paused) timer = setTimeout(poll, POLL);
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  $("pause").textContent = paused ? "Go on" : "Pause";
  if (paused) { clearTimeout(timer); state("paused", "warn"); } else poll();
});
addEventListener("resize", () => { if (shown) requestAnimationFrame(() => figures(shown)); });
for (const choice of document.querySelectorAll("input[name=colour]")) choice.addEventListener("change", legend);
poll();
