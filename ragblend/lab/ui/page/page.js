// The page of `ragblend ui`. Text from documents, questions and answers only ever becomes text (`textContent`); the one
// piece of HTML is the tokens' own, which the server made and escaped.
"use strict";

const MODES = ["full", "prefix", "reuse", "blend"];
const RATIOS = [0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1];
const POLL_MS = 700;
const CONTEXTS = { none: "alone", neutral: "after a neutral text" };

const $ = (id) => document.getElementById(id);
let facts = null; // what the server said of itself last
let running = null; // aborts the question that is being answered
let blending = null; // aborts the blending that the slider asked for
let asked = null; // the question that can be blended again: {id, gold, full}

// -- the server

async function post(path, body, tell, signal) {
  const reply = await fetch(path, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  });
  if (!reply.ok) throw new Error(await reason(reply));
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let ended = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const [first, data] = event.split("\n");
      if (!first.startsWith("event: ")) continue;
      const name = first.slice(7);
      const said = JSON.parse(data.slice(6));
      ended ||= name === "end";
      if (name === "error") throw new Error(said.message);
      tell[name]?.(said);
    }
  }
  if (!ended) throw new Error("The server went away. Is ragblend ui still running in its terminal?");
}

async function reason(reply) {
  const text = await reply.text();
  try { return JSON.parse(text).error; } catch { return text || `the server said ${reply.status}`; }
}

function words(error) {
  if (error instanceof TypeError) return "The server does not answer. Is ragblend ui still running in its terminal?";
  const text = error.message;
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function show(id, text) {
  $(id).textContent = text;
  $(id).hidden = !text;
}

const count = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
const percent = (share) => `${+(100 * share).toFixed(share < 0.01 ? 1 : 0)}\u00a0%`;
const seconds = (time) => (time >= 1 ? `${time.toFixed(2)}\u00a0s` : `${Math.max(1, Math.round(time * 1000))}\u00a0ms`);
const waits = ({ ahead, behind }) => `Waiting for ${ahead === 1 ? "another request" : `${ahead} other requests`}: ${behind} ...`;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// -- what the server is

async function refresh() {
  try {
    const reply = await fetch("/state");
    if (!reply.ok) throw new Error(await reason(reply));
    facts = await reply.json();
  } catch (error) {
    show("problem", words(error));
    return;
  }
  show("problem", facts.status === "failed"
    ? `${facts.model} could not be loaded: ${facts.problem}. End ragblend ui in its terminal (Ctrl-C) and start it again.` : "");
  if (facts.status === "ready") describe();
  else $("about").textContent = facts.status === "loading" ? `Loading ${facts.model} ...` : "";
  const endings = facts.endings.filter((each) => [".txt", ".md", ".html", ".pdf", ".csv", ".json"].includes(each));
  $("endings").textContent = `${endings.map((each) => each.slice(1)).join(", ")}${facts.max_mib ? `; at most ${facts.max_mib} MiB each` : ""}`;
  $("files").accept = facts.endings.join(",");
  if (facts.now?.title === "ingesting documents" && !taking) progress(facts.now);
  else if (!taking) $("taking").hidden = true;
  if (facts.status === "loading" || facts.now) setTimeout(refresh, POLL_MS);
}

function describe() {
  const { model, num_documents, num_chunks, rule, context, k, neighbours } = facts;
  const around = neighbours ? `, each with the ${neighbours} before and after it` : "";
  const nearest = k === 1 ? "the part of your documents that fits a question best" : `the ${k} parts of your documents that fit a question best`;
  $("about").textContent = `${model} answers from ${nearest}${around}.`;
  $("about").title = `${count(k, "chunk")} retrieved per question, each stored alone${context === "neutral" ? " and after a neutral text" : ""}; rule ${rule} chooses what is recomputed`;
  $("demo-note").hidden = !facts.is_demo;
  const list = $("documents");
  list.hidden = !num_documents;
  list.querySelector("summary").textContent = `${count(num_documents, "document")}, ${count(num_chunks, "chunk")} in ${facts.store}`;
  const more = num_documents - facts.documents.length;
  list.querySelector("ul").replaceChildren(
    ...facts.documents.map((name) => element("li", name)), ...(more ? [element("li", `and ${more} more`)] : []));
  if (!num_documents && !$("taken-text").textContent) $("taken-text").textContent = "No documents yet. Drop a few, then ask about them.";
  const examples = $("examples");
  examples.hidden = !facts.examples.length;
  examples.replaceChildren($("examples-title"), ...facts.examples.map(({ question }) => {
    const button = element("button", question);
    button.type = "button";
    button.addEventListener("click", () => { $("question").value = question; ask(question); });
    return button;
  }));
}

// -- documents

let taking = false;

function progress({ stage, done, total }) {
  const names = { read: "Reading", embed: "Embedding", prefill: "Prefilling chunks" };
  $("taking").hidden = false;
  $("taking-text").textContent = `${names[stage] ?? (stage || "Ingesting")}${total ? `: ${done} of ${total}` : " ..."}`;
  const bar = $("taken");
  if (total) Object.assign(bar, { max: total, value: done });
  else bar.removeAttribute("value");
}

async function take(files) {
  if (!files.length) return;
  taking = true;
  $("taken-text").textContent = "";
  const problems = $("document-problems");
  problems.replaceChildren();
  const complain = (name, text) => problems.append(element("li", `${name}: ${text}`, "error"));
  const names = [];
  for (const [number, file] of files.entries()) {
    progress({ stage: `Sending ${file.name}`, done: number, total: files.length });
    try {
      if (facts?.max_mib && file.size > facts.max_mib * 2 ** 20)
        throw new Error(`is larger than ${facts.max_mib} MiB; cut it, or raise the limit: RAGBLEND_MAX_FILE_MIB=... ragblend ui`);
      const reply = await fetch(`/documents?name=${encodeURIComponent(file.name)}`, { method: "POST", body: file });
      if (!reply.ok) throw new Error(await reason(reply));
      names.push(file.name);
    } catch (error) {
      complain(file.name, error instanceof TypeError ? "could not be sent; a folder is ingested by ragblend ingest FOLDER" : error.message);
    }
  }
  let message = "";
  if (names.length) {
    progress({});
    try {
      await post("/ingest", { names }, {
        waiting: (event) => { $("taking-text").textContent = waits(event); },
        progress,
        ingested: (report) => {
          for (const { name, reason: text } of report.problems) complain(name, text);
          const fresh = report.num_documents - report.num_unchanged;
          message = fresh
            ? `${count(fresh, "document")} ingested: ${count(report.num_chunks, "chunk")}, ${count(report.num_new_kv, "KV cache")} prefilled in ${report.prefill_s.toFixed(1)} s${report.store ? `; the store has ${report.store}` : ""}.`
            : report.num_documents ? "Nothing new: these documents were here already." : "";
        },
      });
    } catch (error) {
      complain(names.length === 1 ? names[0] : "these documents", words(error));
    }
  }
  taking = false;
  $("taking").hidden = true;
  $("taken-text").textContent = message;
  refresh();
}

$("files").addEventListener("change", (event) => {
  take([...event.target.files]);
  event.target.value = "";
});
// A file that misses the field would otherwise replace the page.
addEventListener("dragover", (event) => { event.preventDefault(); $("drop").classList.add("over"); });
addEventListener("dragleave", () => $("drop").classList.remove("over"));
addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  take([...event.dataTransfer.files]);
});

// -- answers

function outcome(mode) {
  const card = $(mode);
  if (!card.querySelector(".ttft")) card.append($("outcome").content.cloneNode(true));
  const part = (name) => card.querySelector(`.${name}`);
  return { card, time: part("time"), than: part("than"), bar: part("track").firstElementChild, answer: part("answer"), verdict: part("verdict"), facts: part("facts") };
}

function empty(mode) {
  const at = outcome(mode);
  at.card.classList.add("waiting");
  at.bar.style.width = "0";
  for (const part of [at.time, at.than, at.answer, at.verdict]) part.textContent = "";
  at.facts.replaceChildren();
}

/** What a question's events do to the cards. */
function watch(about) {
  let clock = null;
  const still = () => clearInterval(clock);
  return {
    still,
    waiting: (event) => show("progress", waits(event)),
    warming: () => show("progress", "Warming up, once ..."),
    start: ({ mode }) => {
      const from = performance.now();
      const at = outcome(mode);
      empty(mode);
      at.card.classList.remove("waiting");
      at.than.textContent = "to the first token";
      show("progress", `Answering by ${at.card.querySelector("h3").textContent} ...`);
      still();
      clock = setInterval(() => { at.time.textContent = `${((performance.now() - from) / 1000).toFixed(1)} s`; }, 100);
    },
    piece: ({ mode, text }) => {
      still();
      outcome(mode).answer.textContent += text;
    },
    answer: (event) => {
      still();
      finish(event, about);
    },
    tokens: ({ html, counts }) => {
      const by_attention = $("by-attention")?.checked;
      const closed = [...$("tokens").querySelectorAll("details")].map((each) => !each.open);
      $("tokens").innerHTML = html; // escaped by the server, and the page's policy runs no script of it
      if (by_attention && $("by-attention")) $("by-attention").checked = true;
      $("tokens").querySelectorAll("details").forEach((each, place) => { if (place in closed) each.open = !closed[place]; });
      $("counts").textContent = `${Object.entries(counts).map(([state, number]) => `${number.toLocaleString("en")} ${state}`).join(", ")}.`;
      hint(null);
    },
  };
}

function finish(event, about) {
  const { mode, agreement } = event;
  const at = outcome(mode);
  const text = event.text.trim() || "(empty)";
  if (mode === "full") about.full = text;
  write(at.answer, text, event.shared, text === about.full);
  at.time.textContent = seconds(event.ttft_s);
  if (mode === "full") about.full_s = event.ttft_s;
  at.bar.style.width = `${Math.min(100, Math.max(1, 100 * event.ttft_s / about.full_s))}%`;
  const factor = about.full_s / event.ttft_s;
  at.than.textContent = mode === "full" ? "to the first token" : factor >= 1.05 ? `${factor.toFixed(1)} times as fast` : factor <= 0.95 ? `${(1 / factor).toFixed(1)} times as long` : "as long";
  const same = agreement?.answers_identical;
  const verdicts = [];
  if (about.gold) verdicts.push(event.text.trim() === about.gold ? "\u2713 right" : `\u2717 wrong: it is ${about.gold}`);
  if (agreement && !about.gold) verdicts.push(same ? "\u2713 full prefill\u2019s answer" : "\u2260 another answer than full prefill\u2019s");
  at.verdict.textContent = verdicts.join(", ");
  at.facts.replaceChildren(...lines(event).map((line) => element("li", line)));
}

/** Write an answer; from `shared` on, where it parts from full prefill's answer, it is marked. */
function write(place, text, shared, same) {
  if (same || !text.startsWith(shared)) { place.textContent = text; return; }
  const mark = element("mark", text.slice(shared.length) || " [full prefill\u2019s answer goes on]");
  mark.title = "From here on it differs from full prefill\u2019s answer.";
  place.replaceChildren(shared, mark);
  place.scrollTop = mark.offsetTop - place.offsetTop - place.clientHeight / 2; // the place of the difference is in view
}

function lines(event) {
  const { mode, agreement } = event;
  const found = [`${event.num_reused_tokens.toLocaleString("en")} of ${count(event.prompt_tokens, "token")} reused`];
  if (mode === "blend") {
    found.push(`${event.num_recomputed_tokens.toLocaleString("en")} recomputed: ${percent(event.recompute_ratio)} of the chunks\u2019 tokens, chosen by rule ${event.rule}`);
    found.push(`${percent(event.charged_budget)} of the work of prefilling the chunks`);
    const before = event.contexts.map((context) => CONTEXTS[context] ?? context).join(" or ");
    if (before) found.push(`the chunks\u2019 stored KV was computed ${before}`);
  }
  if (agreement?.first_token_kl !== undefined)
    found.push(agreement.first_token_kl < 0.0005 ? "first token as full prefill\u2019s" : `first token ${agreement.first_token_kl.toPrecision(2)} nats from full prefill\u2019s`);
  const missing = event.num_chunks - event.num_chunk_hits;
  if (missing && (mode === "reuse" || mode === "blend")) found.push(`${count(missing, "chunk")} not in the store: prefilled here`);
  if (event.refused_reason) found.push(event.refused_reason);
  if (event.finish_reason === "length") found.push("cut off at --max-tokens");
  return found;
}

function list(sources) {
  $("sources").hidden = false;
  $("sources").querySelector("ol").replaceChildren(...sources.map((source) => {
    const summary = element("summary", `${source.place} `);
    summary.title = `${source.source}, characters ${source.start} to ${source.end}`;
    const text = source.text.replace(/\s+/g, " ").trim();
    const place = source.is_neighbour ? "next to a hit" : `similarity ${source.score.toFixed(2)}`;
    summary.append(element("span", `${place}: ${text.length > 90 ? `${text.slice(0, 90).replace(/\s\S*$/, "")} ...` : text}`));
    const details = element("details");
    details.append(summary, element("blockquote", source.text));
    const item = element("li");
    item.append(details);
    return item;
  }));
}

async function ask(question) {
  running?.abort();
  blending?.abort();
  const control = running = new AbortController();
  asked = null;
  const about = { gold: facts?.examples?.find((each) => each.question === question)?.answer, full_s: 0 };
  MODES.forEach(empty);
  show("ask-problem", "");
  show("again-problem", "");
  $("asked").textContent = question;
  $("tokens").replaceChildren();
  $("counts").textContent = "";
  for (const id of ["answers", "prompt", "sources"]) $(id).hidden = true;
  $("ratio-form").hidden = true;
  $("go").textContent = "Stop";
  show("progress", "Looking for chunks ...");
  const seen = watch(about);
  let ratio = 0;
  try {
    await post("/ask", { question }, {
      ...seen,
      sources: ({ sources }) => { list(sources); $("answers").hidden = false; },
      answer: (event) => { seen.answer(event); if (event.mode === "blend") ratio = event.recompute_ratio; },
      tokens: (event) => { seen.tokens(event); $("prompt").hidden = false; },
      asked: ({ id }) => { asked = { ...about, id }; },
    }, control.signal);
    set(ratio);
    $("ratio-form").hidden = false;
    $("no-tokens").hidden = facts.shows_tokens;
    if (!facts.shows_tokens) $("prompt").hidden = false;
  } catch (error) {
    if (control.signal.aborted) { if (running === control) show("ask-problem", "Stopped."); } else show("ask-problem", words(error));
  }
  seen.still();
  if (running !== control) return; // another question took over
  running = null;
  show("progress", "");
  $("go").textContent = "Ask";
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (running) running.abort();
  else if (question) ask(question);
});

// -- the slider

const slider = $("ratio");
slider.max = RATIOS.length - 1;
$("ratio-scale").textContent = `The scale is not linear: its steps are ${RATIOS.slice(0, -1).map((ratio) => 100 * ratio).map(Math.round).join(", ")} and 100\u00a0%.`;

function set(ratio) {
  const nearest = RATIOS.reduce((best, each, place) => (Math.abs(each - ratio) < Math.abs(RATIOS[best] - ratio) ? place : best), 0);
  slider.value = nearest;
  name_ratio(ratio);
}

function name_ratio(ratio) {
  $("ratio-shown").textContent = percent(ratio);
  slider.setAttribute("aria-valuetext", percent(ratio));
}

slider.addEventListener("input", () => name_ratio(RATIOS[slider.value]));
slider.addEventListener("change", async () => {
  if (!asked || running) return;
  blending?.abort();
  const control = blending = new AbortController();
  show("again-problem", "");
  const seen = watch(asked);
  try {
    await post("/blend", { id: asked.id, ratio: RATIOS[slider.value] }, seen, control.signal);
  } catch (error) {
    if (!control.signal.aborted) show("again-problem", words(error));
  }
  seen.still();
  if (blending !== control) return;
  blending = null;
  if (!running) show("progress", "");
});

// -- a token's figures, for fingers and keys: the pointer has its tooltip

function hint(token) {
  document.querySelector(".t.picked")?.classList.remove("picked");
  token?.classList.add("picked");
  show("token-hint", token ? `\u201c${token.textContent.trim()}\u201d: ${token.title}` : "");
}

$("tokens").addEventListener("click", (event) => {
  const token = event.target.closest(".tokens .t");
  if (token) hint(token.classList.contains("picked") ? null : token);
});
addEventListener("keydown", (event) => { if (event.key === "Escape") hint(null); });
addEventListener("focus", () => { if (facts?.status !== "loading") refresh(); }); // another tab may have brought documents
refresh();
