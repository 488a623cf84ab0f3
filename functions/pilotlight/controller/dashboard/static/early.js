// Runs before the first paint and before Plotly.
"use strict";
document.documentElement.classList.add("js");

// The chosen theme is set on the root element; without a choice the system's theme applies.
try {
  const chosen = localStorage.getItem("pilotlight-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch {
  // storage is disabled: no choice is stored
}

// The content security policy allows only styles with the page's nonce. Plotly adds styles of its own: style elements get the nonce,
// and style attributes are set as properties, which are not restricted.
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
