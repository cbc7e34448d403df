// Scripts of all pages: times, live numbers, toasts, dialogs, copying, keyboard, preferences.
// Text from the server goes into text nodes only.

const root = document.documentElement;
const PULSE_MS = 15_000; // shortest time between two refreshes of a part
const RETRY_MS = 3_000; // before reconnecting, after the stream was refused
const AWAY_MS = 4_000; // how long a stream may be gone before the page says so; streams end regularly
const AGAIN_MS = 2_000; // how often a page that failed to load is tried again
const TOAST_MS = 8_000;

// --- preferences, kept in this browser ---------------------------------------------------------

const prefs = {
  get(name, otherwise) {
    try {
      return localStorage.getItem(`fairqueue.${name}`) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`fairqueue.${name}`, value);
    } catch {
      // The choice lasts for one page.
    }
  },
};

// --- times ---------------------------------------------------------------------------------------

const skew = root.dataset.now ? Date.parse(root.dataset.now) - Date.now() : 0;
const now = () => Date.now() + skew;
let zone = prefs.get("zone", "local");

function parts(moment, timeZone) {
  const options = {
    year: "numeric", month: "short", day: "2-digit",
    hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23", timeZone,
  };
  const found = new Intl.DateTimeFormat("en-GB", options).formatToParts(moment);
  return Object.fromEntries(found.map((part) => [part.type, part.value]));
}

const dayOf = (at) => `${at.day} ${at.month} ${at.year}`;

// Today is left out. Both ends of a range have their day, unless it is the same.
function momentText(ms, element) {
  const timeZone = zone === "utc" ? "UTC" : undefined;
  const at = parts(ms, timeZone);
  const today = parts(now(), timeZone);
  const clock = `${at.hour}:${at.minute}:${at.second}`;
  const other = element?.dataset.beside && dayOf(parts(Date.parse(element.dataset.beside), timeZone));
  const isEnd = element?.dataset.end !== undefined;
  const plain = other && other !== dayOf(at) ? false : isEnd || dayOf(at) === dayOf(today);
  if (plain) return clock;
  return at.year === today.year ? `${at.day} ${at.month} ${clock}` : `${dayOf(at)} ${clock}`;
}

function fullText(ms) {
  const one = (timeZone, name) => {
    const at = parts(ms, timeZone);
    return `${at.day} ${at.month} ${at.year} ${at.hour}:${at.minute}:${at.second} ${name}`;
  };
  const here = Intl.DateTimeFormat().resolvedOptions().timeZone;
  return `${one("UTC", "UTC")} · ${one(undefined, here)}`;
}

const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

function durationText(seconds) {
  if (seconds < 0) return `−${durationText(-seconds)}`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1).replace(/\.0$/, "")} s`;
  let left = Math.round(seconds);
  const found = [];
  for (const [unit, size] of UNITS) {
    const many = Math.floor(left / size);
    if (many || found.length) found.push(many ? `${many} ${unit}` : "");
    left -= many * size;
    if (found.length === 2) break;
  }
  return found.filter(Boolean).join(" ");
}

function briefText(seconds) {
  if (seconds < 59.95) return durationText(seconds);
  for (const [unit, length, most] of [["min", 60, 59.95], ["h", 3600, 23.95]]) {
    if (seconds / length < most) return `${(seconds / length).toFixed(1)} ${unit}`;
  }
  return `${(seconds / 86400).toFixed(1)} d`;
}

function agoText(ms) {
  const seconds = Math.round((now() - ms) / 1000);
  if (seconds < 0) return `in ${durationText(-seconds)}`;
  if (seconds < 2) return "just now";
  return `${durationText(seconds).split(" ").slice(0, 2).join(" ")} ago`;
}

function countdownText(ms) {
  const seconds = Math.round((ms - now()) / 1000);
  if (seconds > 0) return `in ${durationText(seconds)}`;
  return seconds > -3 ? "now" : `due ${durationText(-seconds)} ago`;
}

const TIMES = { moment: momentText, ago: agoText, countdown: countdownText };

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function showTimes(within = document) {
  for (const element of within.querySelectorAll("time[data-time]")) {
    const ms = Date.parse(element.dateTime);
    // On a paused page, a time that keeps counting would look live.
    setText(element, (live.wanted ? TIMES[element.dataset.time] : momentText)(ms, element));
    const full = fullText(ms);
    if (element.title !== full) element.title = full;
  }
}

// --- numbers -------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

function numberText(value, format) {
  if (value === null || value === undefined) return "–";
  if (format === "duration") return durationText(value);
  if (format === "brief") return briefText(value);
  if (format === "share") return `${(100 * value).toFixed(1)} %`;
  if (format === "index") return value.toFixed(3);
  return whole.format(value);
}

// --- toasts --------------------------------------------------------------------------------------

function toast(text, level = "success", act = null) {
  const region = document.getElementById("toasts");
  // An open dialog covers everything outside of it, also for screen readers.
  (document.querySelector("dialog[open]") ?? document.body).append(region);
  const item = document.createElement("div");
  item.className = `toast toast-${["success", "warning", "error"].includes(level) ? level : "warning"}`;
  const said = document.createElement("span");
  said.textContent = text;
  const close = document.createElement("button");
  close.type = "button";
  close.className = "plain";
  close.setAttribute("aria-label", "Dismiss");
  close.textContent = "×";
  item.append(said, ...(act ? [act] : []), close);
  region.append(item);
  // Errors stay until they are read.
  if (level !== "error") setTimeout(() => item.remove(), TOAST_MS);
}

document.addEventListener("close", (event) => {
  const region = document.getElementById("toasts");
  if (event.target.contains(region)) document.body.append(region);
}, true);
document.addEventListener("toast", (event) => toast(event.detail.text, event.detail.level));
document.addEventListener("htmx:error", () => toast("The server did not respond. Try again.", "error"));

// --- the stream ----------------------------------------------------------------------------------

const live = {
  source: null,
  base: null,
  last: null,
  wanted: prefs.get("live", "on") === "on",
  pulsed: Date.now(),
  known: now(), // when the data of the page was current
  away: null,
};

function showState(state) {
  const button = document.getElementById("live");
  if (!button) return;
  button.dataset.state = state;
  button.setAttribute("aria-pressed", String(live.wanted));
  const words = { live: "Live", paused: "Paused", waiting: "Connecting", down: "No data", out: "Signed out" };
  setText(button.querySelector("span"), words[state]);
}

// The page is out of date because of "redis" or "server"; null: it is current.
function showAlarm(cause) {
  const alarm = document.getElementById("unavailable");
  if (!alarm) return;
  clearTimeout(live.away);
  live.away = null;
  if (cause) {
    const time = alarm.querySelector("time");
    time.dateTime = new Date(live.known).toISOString();
    for (const part of alarm.querySelectorAll("[data-cause]")) part.hidden = part.dataset.cause !== cause;
    showTimes(alarm);
    showState("down");
  }
  if (alarm.hidden === Boolean(cause)) alarm.hidden = !cause;
}

// Partitions of the queue that do not answer.
function showMissing(text) {
  const notice = document.getElementById("missing");
  if (!notice || text === undefined) return;
  setText(notice.querySelector("span"), text);
  notice.hidden = !text;
}

function showNumbers(numbers) {
  showMissing(numbers.missing);
  for (const element of document.querySelectorAll("[data-live]")) {
    const value = numbers[element.dataset.live];
    if (value === undefined) continue;
    setText(element, numberText(value, element.dataset.format));
    if (element.classList.contains("badge")) element.hidden = !value;
  }
  for (const element of document.querySelectorAll("[data-new]")) {
    const names = element.dataset.new.split(",");
    const grown = names.reduce(
      (sum, name) => sum + (numbers.counters[name] ?? 0) - (live.base.counters[name] ?? 0), 0);
    element.hidden = grown <= 0;
    setText(element.querySelector("[data-count]"), whole.format(grown));
  }
}

function onNumbers(event) {
  const numbers = JSON.parse(event.data);
  if (numbers.unavailable) {
    showAlarm("redis");
    return;
  }
  const wasDown = document.getElementById("unavailable")?.hidden === false;
  live.known = now();
  showAlarm(null);
  showState("live");
  live.base ??= numbers;
  live.last = numbers;
  root.dataset.fresh = "true";
  showNumbers(numbers);
  if (wasDown || Date.now() - live.pulsed >= PULSE_MS) pulse();
}

function pulse() {
  live.pulsed = Date.now();
  // Do not disturb a user who types or has a dialog open.
  const busy = document.querySelector("dialog[open]") || document.activeElement?.matches("main input, main select, main textarea");
  if (!busy) document.body.dispatchEvent(new CustomEvent("fq:pulse"));
}

async function onTrouble() {
  const isDown = document.getElementById("unavailable")?.hidden === false;
  if (!isDown) {
    showState("waiting");
    live.away ??= setTimeout(() => live.wanted && showAlarm("server"), AWAY_MS);
  }
  if (live.source?.readyState !== EventSource.CLOSED) return; // the browser reconnects by itself
  live.source = null;
  const answer = await fetch(location.href, { method: "HEAD" }).catch(() => null);
  if (answer?.status === 401) {
    sayExpired();
    return;
  }
  if (answer?.status === 503) showAlarm("redis");
  setTimeout(() => live.wanted && !live.source && connect(), RETRY_MS);
}

function connect() {
  const url = root.dataset.events;
  if (!url) return;
  if (document.getElementById("unavailable")?.hidden !== false) showState("waiting");
  live.source = new EventSource(url);
  // An open stream means that the dashboard responds; the first message tells whether Redis does.
  live.source.addEventListener("open", () => {
    clearTimeout(live.away);
    live.away = null;
  });
  live.source.addEventListener("numbers", onNumbers);
  live.source.addEventListener("error", onTrouble);
}

function setLive(wanted) {
  live.wanted = wanted;
  prefs.set("live", wanted ? "on" : "off");
  live.source?.close();
  live.source = null;
  showAlarm(null);
  if (wanted) connect();
  else showState("paused");
  showTimes();
}

// --- expired sessions ----------------------------------------------------------------------------

// The page keeps what was typed; after a new login the user continues.
const session = { dialog: document.getElementById("session"), pending: null };
let isTold = false;

function askLogin(form = null) {
  showState("out");
  if (!session.dialog) return;
  session.pending = form;
  setText(document.getElementById("session-error"), "");
  if (!session.dialog.open) session.dialog.showModal();
}

// Do not interrupt a user who reads or types.
function sayExpired() {
  showState("out");
  if (isTold || session.dialog?.open) return;
  isTold = true;
  const act = document.createElement("button");
  act.type = "button";
  act.className = "secondary small";
  act.textContent = "Log in";
  act.dataset.login = "";
  toast("Your session has expired. What you typed is kept.", "error", act);
}

const isLoggedIn = async () => (await fetch(location.href, { method: "HEAD" }).catch(() => null))?.status !== 401;

async function logIn(form) {
  const data = new URLSearchParams(new FormData(form));
  if (data.get("secret")) {
    // A successful login redirects. Only its cookie is needed here.
    const answer = await fetch(form.action, { method: "POST", body: data, redirect: "manual" }).catch(() => null);
    if (answer?.type === "opaqueredirect") return "";
    return answer?.status === 401 ? "This key is unknown or was revoked." : "That did not work. Try again in a moment.";
  }
  return (await isLoggedIn()) ? "" : "You are not logged in yet. Paste a key.";
}

async function goOn(form) {
  const problem = await logIn(form);
  setText(document.getElementById("session-error"), problem);
  if (problem) return;
  const pending = session.pending;
  form.reset();
  session.dialog.close();
  for (const item of document.querySelectorAll(".toast:has([data-login])")) item.remove();
  isTold = false;
  toast("You are logged in again.");
  if (live.wanted && !live.source) connect();
  pending?.requestSubmit();
}

document.addEventListener("fq:session", (event) => {
  const isOwn = event.target.closest?.("[hx-trigger*='fq:pulse']"); // a refresh by the page itself
  if (isOwn) sayExpired();
  else askLogin(event.target.closest?.("form[method=post]"));
});

// Check the session before a form leaves the page. htmx sends the other forms.
document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (!session.dialog || form.method !== "post" || form.hasAttribute("hx-post")) return;
  if (session.dialog.contains(form)) {
    event.preventDefault();
    goOn(form);
    return;
  }
  if (form.dataset.sent !== undefined || form.closest(".whoami")) return;
  event.preventDefault();
  if (!(await isLoggedIn())) {
    askLogin(form);
    return;
  }
  form.dataset.sent = "";
  form.requestSubmit(event.submitter);
  delete form.dataset.sent;
});

// --- controls ------------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];

function showTheme() {
  const theme = root.dataset.theme ?? "auto";
  const button = document.getElementById("theme");
  if (!button) return;
  button.dataset.state = theme;
  button.setAttribute("aria-label", `Theme: ${theme}`);
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(root.dataset.theme ?? "auto") + 1) % THEMES.length];
  if (theme === "auto") delete root.dataset.theme;
  else root.dataset.theme = theme;
  prefs.set("theme", theme);
  showTheme();
  document.dispatchEvent(new CustomEvent("fq:theme"));
}

function showZone() {
  const button = document.getElementById("zone");
  if (!button) return;
  setText(button.querySelector("span"), zone === "utc" ? "UTC" : "Local");
  button.setAttribute("aria-label", zone === "utc" ? "Times in UTC" : "Times in local time");
}

function nextZone() {
  zone = zone === "utc" ? "local" : "utc";
  prefs.set("zone", zone);
  showZone();
  showTimes();
  document.dispatchEvent(new CustomEvent("fq:zone"));
}

function setMenu(open) {
  const button = document.getElementById("menu");
  button.setAttribute("aria-expanded", String(open));
  document.body.classList.toggle("menu-open", open);
  if (open) document.querySelector("#navigation a")?.focus();
}

async function copy(button) {
  const text = document.getElementById(button.dataset.copy).textContent;
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied");
  } catch {
    getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
    toast("Press Ctrl+C to copy", "warning");
  }
}

const CLICKS = {
  live: () => (document.getElementById("live").dataset.state === "out" ? askLogin() : setLive(!live.wanted)),
  theme: nextTheme,
  zone: nextZone,
  menu: () => setMenu(document.getElementById("menu").getAttribute("aria-expanded") !== "true"),
};

document.addEventListener("click", (event) => {
  const target = event.target.closest("button, [data-dialog]");
  if (!target) {
    if (!event.target.closest("#navigation") && document.body.classList.contains("menu-open")) setMenu(false);
    if (event.target.matches("dialog[open]")) event.target.close(); // a click outside the box
    return;
  }
  CLICKS[target.id]?.();
  if (target.dataset.copy) copy(target);
  if (target.dataset.dialog) document.getElementById(target.dataset.dialog).showModal();
  if (target.dataset.login !== undefined) askLogin();
  if (target.dataset.close !== undefined) target.closest("dialog").close();
  if (target.closest(".toast") && target.matches(".plain")) target.closest(".toast").remove();
});

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select, [contenteditable]");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    document.getElementById("search")?.focus();
  }
  if (event.key === "Escape" && document.body.classList.contains("menu-open")) {
    setMenu(false);
    document.getElementById("menu").focus();
  }
});

// Tick all rows of a table, and count the ticked ones.
document.addEventListener("change", (event) => {
  const all = event.target.closest("[data-all]");
  if (all) {
    for (const box of document.querySelectorAll(`input[name="${all.dataset.all}"]`)) box.checked = all.checked;
  }
  for (const place of document.querySelectorAll("[data-ticked]")) {
    const many = document.querySelectorAll(`input[name="${place.dataset.ticked}"]:checked`).length;
    setText(place, whole.format(many));
    const bar = place.closest("[data-bulk]");
    if (bar) bar.hidden = many === 0;
  }
  // Selects of filters apply at once.
  if (event.target.matches("form.filters select")) event.target.form.requestSubmit();
});

// Links to another window or view keep what was typed into the filters.
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-keeps]");
  const form = link && document.querySelector("form.filters");
  if (!form) return;
  const url = new URL(link.href);
  const own = new Set(["last", "since", "until", "window", "cursor"]); // set by these links
  const names = new Set([...form.elements].map((field) => field.name).filter((name) => name && !own.has(name)));
  for (const name of names) url.searchParams.delete(name);
  for (const [name, value] of new FormData(form)) if (names.has(name)) url.searchParams.append(name, value);
  link.href = url;
}, true);

// Leave empty filters out of the URL.
document.addEventListener("formdata", (event) => {
  if (!event.target.matches("form.filters")) return;
  for (const [name, value] of [...event.formData]) if (value === "") event.formData.delete(name);
});

// --- start ---------------------------------------------------------------------------------------

document.addEventListener("fq:times", () => showTimes()); // a page has added times
document.addEventListener("htmx:after:swap", () => {
  showTimes();
  if (live.last) showNumbers(live.last);
});
showTheme();
showZone();
showTimes();
setInterval(() => document.visibilityState === "visible" && showTimes(), 1000);
// Browsers open six connections per server: hidden tabs must not hold them.
document.addEventListener("visibilitychange", () => {
  if (!live.wanted) return;
  live.source?.close();
  live.source = null;
  if (document.visibilityState === "visible") connect();
});
addEventListener("pagehide", () => live.source?.close());
addEventListener("pageshow", (event) => event.persisted && live.wanted && connect());
if (live.wanted) connect();
else showState("paused");
// Reload a page that failed as soon as the server is back.
if (document.querySelector("[data-again]")) {
  setInterval(async () => {
    const answer = await fetch(location.href, { method: "HEAD" }).catch(() => null);
    if (answer && answer.status !== 503) location.reload();
  }, AGAIN_MS);
}
for (const form of document.querySelectorAll("form[data-auto-submit]")) form.requestSubmit();
