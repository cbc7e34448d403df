// What the pages about schedules do by themselves: dialogs that the server fills, rows that stay
// where they are while their contents are kept up to date, and forms that check what is typed.

// --- dialogs that are filled by the server ---------------------------------------------------------

document.addEventListener("htmx:after:swap", () => {
  const asked = document.getElementById("asked");
  if (asked?.childElementCount && !asked.open) asked.showModal();
});
// Emptied when it is closed, so that it opens only with a new answer.
document.getElementById("asked")?.addEventListener("close", (event) => event.target.replaceChildren());

// --- the list --------------------------------------------------------------------------------------

document.addEventListener("change", (event) => {
  if (!event.target.matches("input[name=id], [data-all]")) return;
  const all = document.querySelector("#bulk input[name=all]");
  if (all && !document.querySelector("input[name=id]:checked")) all.checked = false;
});

const REFRESH_MS = 30_000; // a list with filters may take the server a while
let refreshed = -REFRESH_MS;

// New contents for the rows that are shown; none comes, goes or moves under the reader's hand.
async function refreshRows(body) {
  const url = addressOf(body);
  const answer = url && await fetch(url, { headers: { Accept: "text/html" } }).catch(() => null);
  if (!answer?.ok || answer.redirected) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const found = new Map([...fresh.querySelectorAll("[data-refresh] > tr")].map((row) => [row.dataset.key, row]));
  for (const row of body.rows) {
    const next = found.get(row.dataset.key);
    if (!next || row.contains(document.activeElement)) continue;
    for (let i = 0; i < row.cells.length; i++) {
      if (row.cells[i].matches(".tick") || !next.cells[i]) continue;
      const cell = document.importNode(next.cells[i], true);
      if (textOf(row.cells[i]) === textOf(cell)) continue;
      row.cells[i].replaceWith(cell);
      htmx.process(cell);
    }
    row.className = next.className;
    row.toggleAttribute("data-open", next.hasAttribute("data-open"));
  }
  document.dispatchEvent(new CustomEvent("fq:times"));
}

// Where the rows come from: the list itself; or, where rows move on to other pages while more come,
// an address that gives those which can still change by their keys. null: none can.
function addressOf(body) {
  if (!body.dataset.refresh) return location.href;
  const keys = [...body.querySelectorAll("tr[data-open]")].map((row) => ["id", row.dataset.key]);
  return keys.length ? `${body.dataset.refresh}?${new URLSearchParams(keys)}` : null;
}

// What a cell says, with moments by their date and not by their distance.
function textOf(cell) {
  const copy = cell.cloneNode(true);
  for (const time of copy.querySelectorAll("time")) time.replaceWith(time.dateTime);
  return copy.innerHTML;
}

document.body.addEventListener("fq:pulse", () => {
  const body = document.querySelector("[data-refresh]");
  const isDear = body && !body.dataset.refresh;
  if (!body || document.visibilityState !== "visible" || (isDear && performance.now() - refreshed < REFRESH_MS)) return;
  refreshed = performance.now();
  refreshRows(body);
});

// --- forms -----------------------------------------------------------------------------------------

// Of the three kinds of rules, only the fields of the chosen one are shown.
function showKind(form) {
  const chosen = form.querySelector("input[name=kind]:checked")?.value;
  for (const part of form.querySelectorAll("[data-kind-of]")) part.hidden = part.dataset.kindOf !== chosen;
}

// JSON is checked here as well, so that a slip is seen while it is made.
function checkJson(area) {
  const place = document.getElementById(`error-${area.name}`);
  if (!place) return;
  let problem = "";
  try {
    if (area.value.trim()) JSON.parse(area.value);
  } catch (error) {
    problem = `Not valid JSON yet: ${error.message}`;
  }
  if (place.textContent !== problem) place.textContent = problem;
  showMarks(area.form);
}

// A field is marked as long as a reason stands below it.
function showMarks(form) {
  for (const place of form.querySelectorAll(".field-error")) {
    const field = document.getElementById(place.id.replace("error-", "field-"));
    if (place.textContent.trim()) field?.setAttribute("aria-invalid", "true");
    else field?.removeAttribute("aria-invalid");
  }
}

// What was wrong with a field is not said of what is typed now.
function clearMark(form, field) {
  document.getElementById(`error-${field.name}`)?.replaceChildren();
  showMarks(form);
}

for (const form of document.querySelectorAll("form[data-schedule-form]")) {
  showKind(form);
  form.addEventListener("input", (event) => clearMark(form, event.target));
  document.addEventListener("htmx:after:swap", () => showMarks(form));
  form.addEventListener("change", () => showKind(form));
  for (const area of form.querySelectorAll("textarea[data-json]")) area.addEventListener("change", () => checkJson(area));
}

// What was counted is not what a changed range would be.
document.addEventListener("input", (event) => {
  if (event.target.closest("#backfill-range")) document.getElementById("backfill-answer")?.replaceChildren();
});
