// Draws the engine once a second while the drawing is visible.
const host = element.querySelector(".observatory");
const PERIOD_MS = 1000, WINDOW_S = 30, HISTORY = 90;
const PHASES = { queued: "queued", prefill: "prefill", decode: "decode", grammar: "decode under a grammar", preempted: "preempted" };
host.innerHTML = `
  <p class="which" role="group" aria-label="Model that is drawn" hidden></p>
  <div class="tiles"></div>
  <div class="charts">
    <section class="wide"><h2>Batch lanes</h2><button type="button" class="send">Send 12 requests</button><p class="legend phases"></p><div class="plot lanes"></div></section>
    <section class="wide"><h2>KV cache blocks</h2><p class="legend kv"></p><canvas class="plot map" role="img" aria-label="KV cache blocks"></canvas></section>
    <section><h2>Time per step</h2><p class="legend"><i class="k-step"></i>whole step <i class="k-gap"></i>Python's part of it</p><div class="plot steps"></div></section>
    <section><h2>Time to first token</h2><p class="legend note"></p><div class="plot ttft"></div></section>
    <section><h2>Time between tokens</h2><p class="legend note"></p><div class="plot itl"></div></section>
    <section><h2>Event-loop lag</h2><p class="legend note"></p><div class="plot lag"></div></section>
  </div>`;
const at = (selector) => host.querySelector(selector);
at(".phases").innerHTML = Object.entries(PHASES).map(([key, word]) => `<i class="p-${key}"></i>${word}`).join(" ");
const seconds = (value) => value >= 1 ? `${value.toFixed(value < 10 ? 1 : 0)} s`
  : value >= 1e-3 ? `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms` : `${Math.round(value * 1e6)} µs`;
const escape = (text) => text.replace(/[&<>"]/g, (char) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[char]);
const history = [];
let before = null;

// Draws the model that works, until a person chooses one.
let chosen = "", drawn = "";
const drawNames = ({ models, model }) => {
  if (model !== drawn) { before = null; history.length = 0; }
  const box = at(".which"), names = JSON.stringify([models, model]);
  drawn = model;
  if (box.dataset.names === names) return;
  Object.assign(box, { hidden: models.length < 2, innerHTML: models.map((name) =>
    `<button type="button" aria-pressed="${name === model}">${escape(name)}</button>`).join("") });
  box.dataset.names = names;
};
at(".which").onclick = ({ target }) => {
  if (!target.matches("button")) return;
  chosen = target.textContent;
  look();
};

const quantile = (histogram, share) => {
  let seen = 0;
  for (let index = 0; index < histogram.counts.length; index++) {
    seen += histogram.counts[index];
    if (histogram.count && seen >= share * histogram.count) return histogram.buckets[index] ?? Infinity;
  }
  return 0;
};
// The last bucket of a histogram has no upper bound.
const limit = (histogram, share, within = "within ", over = "over ") => {
  const found = quantile(histogram, share);
  return found === Infinity ? over + seconds(histogram.buckets.at(-1)) : within + seconds(found);
};

const drawTiles = (data) => {
  const { stats, limits } = data;
  const now = { time: data.now, ...stats };
  const span = before ? Math.max(now.time - before.time, 1e-3) : 1;
  const rate = before ? Math.max(0, now.generated - before.generated) / span : 0;
  const steps = before ? now.steps - before.steps : 0;
  const perStep = steps > 0 ? (now.step_tokens - before.step_tokens) / steps : 0;
  const hits = stats.queried ? stats.hit / stats.queried : 0;
  // Why tokens in the cache were computed again.
  const missed = [[stats.unused[0], "evicted from a window"], [stats.unused[1], "without a state"]]
    .filter(([count]) => count).map(([count, why]) => `${count.toLocaleString("en")} ${why}`);
  const tiles = [
    ["running", `${stats.running}`, limits.max_num_seqs ? `of ${limits.max_num_seqs}` : ""],
    ["waiting", `${stats.waiting}`, stats.compiling ? `${stats.compiling} grammars compile` : ""],
    ["tokens/s", Math.round(rate).toLocaleString("en"), `${perStep.toFixed(1)} tokens a step`],
    ["prefix cache hits", `${Math.round(hits * 100)}%`, [`${stats.hit.toLocaleString("en")} of ${stats.queried.toLocaleString("en")} tokens`, ...missed].join(", ")],
    ["KV cache used", `${(stats.kv_usage * 100).toFixed(stats.kv_usage < 0.1 ? 1 : 0)}%`, data.blocks ? `${data.blocks.num_owned} of ${data.blocks.num_blocks.toLocaleString("en")} blocks` : ""],
    ["preemptions", `${stats.preemptions}`, stats.restarts ? `${stats.restarts} restarts` : `${stats.rejected} refused`],
    ["event-loop lag, p99", stats.histograms.lag?.count ? limit(stats.histograms.lag, 0.99, "≤ ", "> ") : "–", `engine ${data.state}`],
    ["runs on", ...data.runs_on.map(escape)],
  ];
  const drafts = Object.entries(stats.drafts);
  if (drafts.length) {
    const sum = (at) => drafts.reduce((total, [, counts]) => total + counts[at], 0);
    const shares = drafts.map(([source, counts]) => `${source} ${Math.round((100 * counts[2]) / Math.max(1, counts[1]))}%`);
    tiles.push(["tokens per drafted step", (1 + sum(2) / Math.max(1, sum(0))).toFixed(2), `accepted: ${shares.join(", ")}`]);
  }
  const [loaded, received, saved, prefills] = stats.tiers;
  if (loaded || saved || received) {
    const more = [received && `${received.toLocaleString("en")} from other cores`, saved && `${saved.toLocaleString("en")} saved for them`, prefills && `${prefills} prefills elsewhere`];
    tiles.push(["KV tokens from the host", loaded.toLocaleString("en"), more.filter(Boolean).join(", ")]);
  }
  const resumed = stats.resumed - (before?.resumed ?? stats.resumed);
  if (stats.resumed) tiles.push(["resumed after a loss", `${stats.resumed}`, resumed ? `${resumed} just now` : `${stats.restarts} restarts`]);
  if (data.replicas.length > 1) data.replicas.forEach((each, index) => tiles.push([
    `replica ${index}`, each.state === "ready" ? `${each.running} of ${each.requests}` : each.state,
    `${Math.round(each.hit_share * 100)}% hits, ${Math.round(each.kv_usage * 100)}% KV${each.restarts ? `, ${each.restarts} restarts` : ""}`,
  ]));
  at(".tiles").innerHTML = tiles.map(([name, value, more]) =>
    `<div class="tile"><span>${name}</span><b>${value}</b><small title="${more}">${more}</small></div>`).join("");
  const mean = (name) => {
    const one = stats.histograms[name], two = before?.histograms[name];
    return two && one.count > two.count ? (one.sum - two.sum) / (one.count - two.count) : null;
  };
  history.push([mean("itl"), mean("gap")]);
  if (history.length > HISTORY) history.shift();
  before = now;
};

at(".send").onclick = ({ target }) => { target.disabled = true; server.send(drawn).catch(() => { target.disabled = false; }); };
const drawLanes = (lanes) => {
  const height = 16, gap = 4, width = 1000;
  const shown = lanes.filter((lane) => lane.segments.at(-1)[2] > -WINDOW_S);
  const open = shown.filter((lane) => lane.open).length, send = at(".send");
  send.hidden = open > 0;
  if (open) send.disabled = false;
  if (!shown.length) { at(".lanes").innerHTML = '<p class="quiet">Nothing runs at the moment. Send 12 requests and watch.</p>'; return; }
  const x = (time) => Math.max(0, (1 + time / WINDOW_S) * width);
  const rows = shown.map((lane, row) => {
    const y = row * (height + gap);
    const bars = lane.segments.filter((part) => part[2] > -WINDOW_S).map(([phase, start, end]) =>
      `<rect class="p-${phase}" x="${x(start).toFixed(1)}" y="${y}" width="${Math.max(2, x(end) - x(start)).toFixed(1)}" height="${height}" rx="2"${lane.hue == null ? "" : ` style="stroke:hsl(${Number(lane.hue)} 75% 45%);stroke-width:2.5;paint-order:stroke"`}><title>${PHASES[phase]}, ${seconds(end - start)}: ${escape(lane.tip)}</title></rect>`);
    return bars.join("");
  });
  const total = shown.length * (height + gap);
  const marks = [0, 10, 20].map((time) => `<line class="grid" x1="${x(time - WINDOW_S)}" x2="${x(time - WINDOW_S)}" y1="0" y2="${total}"/>`).join("");
  at(".lanes").innerHTML = `<svg viewBox="0 0 ${width} ${total}" preserveAspectRatio="none" style="height:${total}px" role="img" aria-label="${shown.length} requests in the last 30 seconds, ${open} of them still running">${marks}${rows.join("")}</svg><p class="axis"><span>30 s ago</span><span>20 s</span><span>10 s</span><span>now</span></p>`;
};

const drawMap = (blocks) => {
  const canvas = at(".map");
  if (!blocks) return;
  const style = getComputedStyle(host);
  const colour = (kind) => kind < 3 ? style.getPropertyValue(["--k-free", "--k-cached", "--k-shared"][kind]) : `hsl(${((kind - 3) * 67 + 265) % 360} 62% 55%)`;
  const cells = blocks.runs.flatMap(([kind, count]) => Array(count).fill(kind));
  const width = canvas.clientWidth || 600, size = 9, step = size + 2;
  const perRow = Math.max(1, Math.floor(width / step));
  const rest = Math.max(0, Math.min(blocks.num_blocks / blocks.group - cells.length, perRow * 2 - (cells.length % perRow)));
  const total = Math.ceil(cells.length + rest);
  const scale = window.devicePixelRatio || 1, height = Math.max(1, Math.ceil(total / perRow)) * step;
  canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  for (let index = 0; index < total; index++) {
    pen.fillStyle = colour(cells[index] ?? 0);
    pen.fillRect((index % perRow) * step, Math.floor(index / perRow) * step, size, size);
  }
  const free = blocks.num_blocks - blocks.num_owned;
  canvas.setAttribute("aria-label", `${blocks.num_owned} blocks owned, ${blocks.num_cached} cached, ${free} free`);
  const each = blocks.group > 1 ? `a square is ${blocks.group} blocks` : "a square is one block";
  const beyond = blocks.num_blocks > total * blocks.group ? `; ${Math.round(blocks.num_blocks - total * blocks.group).toLocaleString("en")} more are free` : "";
  at(".kv").innerHTML = `<i class="k-owned"></i>owned, one colour per request <i class="k-shared"></i>shared <i class="k-cached"></i>cached prefix <i class="k-free"></i>free <span>${each} of ${blocks.block_size} tokens${beyond}</span>`;
};

const drawSteps = () => {
  const width = 300, height = 90;
  const top = Math.max(...history.map(([itl]) => itl || 0), 1e-3) * 1.15;
  const line = (index) => {
    let path = "", pen = false;
    history.forEach((each, place) => {
      if (each[index] === null) { pen = false; return; }
      path += `${pen ? "L" : "M"}${((place / (Math.max(history.length, 30) - 1)) * width).toFixed(1)} ${(height - (each[index] / top) * height).toFixed(1)}`;
      if (!pen) path += "h0.01";
      pen = true;
    });
    return path;
  };
  const last = history.findLast(([itl]) => itl !== null);
  const words = last ? `${seconds(last[0])} per step${last[1] ? `, ${seconds(last[1])} of it in Python` : ""}` : "Nothing has run yet.";
  at(".steps").innerHTML = `<svg viewBox="0 0 ${width} ${height}" preserveAspectRatio="none" role="img" aria-label="${words}"><path class="k-step" d="${line(0)}"/><path class="k-gap" d="${line(1)}"/></svg><p class="axis"><span>${words}</span><span>${last ? `at most ${seconds(top)}` : ""}</span></p>`;
};

const drawHistogram = (name, histogram) => {
  const box = at(`.${name}`);
  if (!histogram?.count) { box.innerHTML = '<p class="quiet">Nothing measured yet.</p>'; box.previousElementSibling.textContent = ""; return; }
  const first = histogram.counts.findIndex((count) => count > 0);
  const end = histogram.counts.findLastIndex((count) => count > 0) + 1;
  const low = Math.max(0, Math.min(first - 1, end - 7)), high = Math.min(histogram.counts.length, Math.max(end, low + 7));
  const counts = histogram.counts.slice(low, high), top = Math.max(...counts);
  const bars = counts.map((count, index) => {
    const bound = histogram.buckets[low + index];
    const label = bound === undefined ? "more" : `≤ ${seconds(bound)}`;
    return `<span class="bar-box" title="${label}: ${count.toLocaleString("en")}"><i style="height:${count ? Math.max(2, (count / top) * 72) : 0}px"></i><small>${index % 2 ? "" : bound === undefined ? "∞" : seconds(bound)}</small></span>`;
  });
  const half = limit(histogram, 0.5), most = limit(histogram, 0.99);
  box.innerHTML = `<div class="bars" role="img" aria-label="half of ${histogram.count} ${half}, 99 percent ${most}">${bars.join("")}</div>`;
  box.previousElementSibling.textContent = `half ${half}, 99% ${most}, ${histogram.count.toLocaleString("en")} in all`;
};

let isAsking = false;
const look = async () => {
  if (isAsking || document.hidden || !host.checkVisibility()) return;
  isAsking = true;
  try {
    const data = await server.poll(chosen);
    host.dataset.looks = String(Number(host.dataset.looks || 0) + 1);
    drawNames(data);
    drawTiles(data);
    drawLanes(data.lanes);
    drawMap(data.blocks);
    drawSteps();
    for (const name of ["ttft", "itl", "lag"]) drawHistogram(name, data.stats.histograms[name]);
    host.classList.remove("away");
  } catch {
    host.classList.add("away");
  } finally {
    isAsking = false;
  }
};
const timer = setInterval(() => { host.isConnected ? look() : clearInterval(timer); }, PERIOD_MS);
look();
