// Reads /status/data every second and shows it. Text goes into the page as text, never as markup. Addresses are made of
// the origin: a page whose own address holds a password must not pass it on.
"use strict";

const EVERY_MS = 1000;
const MAX_POINTS = 120;
const series = { rate: [], running: [], waiting: [], cache: [] };
let last = null;

const at = (id) => document.getElementById(id);
const whole = (n) => Math.round(n).toLocaleString("en");
const seconds = (n) => (n < 1 ? `${(n * 1000).toFixed(0)} ms` : `${n.toFixed(2)} s`);

function keep(name, value) {
  series[name].push(value);
  if (series[name].length > MAX_POINTS) series[name].shift();
}

function plot(name, most) {
  const svg = at(`${name}-plot`);
  const values = series[name];
  const top = most ?? Math.max(1, ...values);
  const points = values.map((v, i) => `${MAX_POINTS - values.length + i},${(100 - (100 * v) / top).toFixed(1)}`);
  svg.setAttribute("viewBox", `0 -2 ${MAX_POINTS - 1} 104`);
  svg.setAttribute("preserveAspectRatio", "none");
  const path = svg.firstChild ?? svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
  const left = MAX_POINTS - values.length;
  path.setAttribute("d", points.length > 1 ? `M${left},100 L${points.join(" L")} L${MAX_POINTS - 1},100 Z` : "");
}

function mean(histogram) {
  return histogram && histogram.count ? seconds(histogram.sum / histogram.count) : "–";
}

function row(cells, header) {
  const tr = document.createElement("tr");
  cells.forEach((cell, i) => {
    const td = document.createElement(header && i === 0 ? "th" : "td");
    td.textContent = cell;
    if (header && i === 0) td.scope = "row";
    if (typeof cell === "number" || /^[\d,.]+$/.test(cell)) td.className = "number";
    tr.append(td);
  });
  return tr;
}

function totals(stats) {
  const queries = stats.prefix_cache_queries_total ?? 0;
  const ended = stats.request_success_total ?? {};
  const drafted = stats.spec_decode_num_draft_tokens_total ?? 0;
  const rows = [
    ["tokens generated", whole(stats.generation_tokens_total ?? 0)],
    ["prompt tokens", whole(stats.prompt_tokens_total ?? 0)],
    ["sequences ended", Object.entries(ended).map(([why, n]) => `${why} ${whole(n)}`).join(", ") || "0"],
    ["found in the prefix cache", queries ? `${((100 * stats.prefix_cache_hits_total) / queries).toFixed(1)} %` : "–"],
    ["preemptions", whole(stats.num_preemptions_total ?? 0)],
    ["time to the first token, mean", mean(stats.time_to_first_token_seconds)],
    ["time between tokens, mean", mean(stats.inter_token_latency_seconds)],
    ["a step, mean", mean(stats.step_time_seconds)],
  ];
  if (drafted) {
    const share = (100 * stats.spec_decode_num_accepted_tokens_total) / drafted;
    rows.push(["drafts accepted", `${share.toFixed(1)} % of ${whole(drafted)}`]);
  }
  at("totals").tBodies[0].replaceChildren(...rows.map((r) => row(r, true)));
}

function show(data) {
  const { stats, info, server } = data;
  const ready = server.status === "serving" && server.ready;
  at("state").textContent = ready ? "serving" : server.detail ? `${server.status}: ${server.detail}` : server.status;
  at("state").className = `state ${ready ? "ready" : "not"}`;
  at("version").textContent = server.version;
  if (info) {
    at("model").textContent =
      `${info.name} on ${info.device} (${info.device_name}), ${info.dtype}, up to ${whole(info.max_model_len)} tokens a sequence`;
    document.title = `${info.name} · Inferplane`;
  }
  if (stats.generation_tokens_total === undefined && stats.num_requests_running === undefined) return;
  const now = { time: performance.now(), tokens: stats.generation_tokens_total ?? 0 };
  const rate = last && now.tokens >= last.tokens ? (1000 * (now.tokens - last.tokens)) / (now.time - last.time) : 0;
  last = now;
  keep("rate", rate);
  keep("running", stats.num_requests_running ?? 0);
  keep("waiting", stats.num_requests_waiting ?? 0);
  keep("cache", stats.kv_cache_usage_perc ?? 0);
  at("rate").textContent = rate < 10 ? rate.toFixed(1) : whole(rate);
  at("running").textContent = whole(stats.num_requests_running ?? 0);
  at("waiting").textContent = whole(stats.num_requests_waiting ?? 0);
  at("cache").textContent = `${(100 * (stats.kv_cache_usage_perc ?? 0)).toFixed(1)} %`;
  plot("rate");
  plot("running", info ? info.max_batch : undefined);
  plot("waiting");
  plot("cache", 1);
  totals(stats);
}

async function kernels() {
  const answer = await fetch(`${location.origin}/status/kernels`);
  if (!answer.ok) return false;
  const data = await answer.json();
  at("kernels-note").textContent = `What runs a decoding step on ${data.device}.`;
  at("kernels").tBodies[0].replaceChildren(...data.kernels.map((k) => row([k.op, k.kernel, k.sites, k.why])));
  return true;
}

async function update() {
  try {
    const answer = await fetch(`${location.origin}/status/data`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    show(await answer.json());
    if (!at("kernels").tBodies[0].rows.length) await kernels();
  } catch (error) {
    at("state").textContent = `no answer (${error.message})`;
    at("state").className = "state not";
  }
  setTimeout(update, EVERY_MS);
}

update();
