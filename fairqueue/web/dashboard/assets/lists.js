// Scripts of lists and forms: dialogs that the server fills, rows that are updated in place, and
// checks of what is typed.

// --- dialogs that are filled by the server ---------------------------------------------------------

document.addEventListener("htmx:after:swap", () => {
  const asked = document.getElementById("asked");
  if (asked?.childElementCount && !asked.open) asked.showModal();
});
// Emptied when it closes, so that it opens only with a new response.
document.getElementById("asked")?.addEventListener("close", (event) => event.target.replaceChildren());

// --- the list --------------------------------------------------------------------------------------

document.addEventListener("change", (event) => {
  if (!event.target.matches("input[name=id], [data-all]")) return;
  const all = document.querySelector("#bulk input[name=all]");
  if (all && !document.querySelector("input[name=id]:checked")) all.checked = false;
});

const REFRESH_MS = 30_000; // a filtered list may be expensive
let refreshed = -REFRESH_MS;

// Update the rows that are shown. No row is added, removed or moved.
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

// The URL of the rows: the list itself, or a URL that returns rows that can still change by their
// keys. null: no row can change.
function addressOf(body) {
  if (!body.dataset.refresh) return location.href;
  const keys = [...body.querySelectorAll("tr[data-open]")].map((row) => ["id", row.dataset.key]);
  return keys.length ? `${body.dataset.refresh}?${new URLSearchParams(keys)}` : null;
}

// The content of a cell, with dates instead of relative times.
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

// Show only the fields of the chosen kind of rule.
function showKind(form) {
  const chosen = form.querySelector("input[name=kind]:checked")?.value;
  for (const part of form.querySelectorAll("[data-kind-of]")) part.hidden = part.dataset.kindOf !== chosen;
}

// JSON is also checked here, while it is typed.
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

// Mark each field that has an error message.
function showMarks(form) {
  for (const place of form.querySelectorAll(".field-error")) {
    const field = document.getElementById(place.id.replace("error-", "field-"));
    if (place.textContent.trim()) field?.setAttribute("aria-invalid", "true");
    else field?.removeAttribute("aria-invalid");
  }
}

// Clear the error of a field when its value changes.
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

// A changed range invalidates the count.
document.addEventListener("input", (event) => {
  if (event.target.closest("#backfill-range")) document.getElementById("backfill-answer")?.replaceChildren();
});
