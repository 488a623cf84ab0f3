// Runs before the first paint: what was chosen stands on the root element; without a choice the system's own applies.
"use strict";
document.documentElement.classList.add("js");
try {
  const chosen = localStorage.getItem("pilotlight-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch {
  // storage is switched off: nothing was chosen
}
