// Apply the chosen theme before the first paint; by default the system's is used.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("fairqueue.theme");
  } catch {
    // Without storage, the choice lasts for one page.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
