// Runs before the first paint and before Plotly.
"use strict";
document.documentElement.classList.add("js");

// What was chosen stands on the root element; without a choice the system's own theme applies.
try {
  const chosen = localStorage.getItem("pilotlight-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch {
  // storage is switched off: nothing was chosen
}

// The page's policy allows styles with its nonce alone. Plotly writes a few of its own: as elements they get the nonce, and what it
// would write as attributes is set as properties, which are not restricted.
const nonce = document.currentScript.nonce;
const createElement = document.createElement;
document.createElement = function (name, options) {
  const made = createElement.call(this, name, options);
  if (made.localName === "style") made.nonce = nonce;
  return made;
};
const setAttribute = Element.prototype.setAttribute;
Element.prototype.setAttribute = function (name, value) {
  if (name === "style") this.style.cssText = value;
  else setAttribute.call(this, name, value);
};
