// Before the first paint: the theme that the reader chose, if any. Else the system's is used.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("fairqueue.theme");
  } catch {
    // Storage may be forbidden; then the choice lasts for one page.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
