// Sends the one-time code in the page's fragment (`pilotlight dashboard`), which browsers send to no server and no log, as a form.
"use strict";
const code = new URLSearchParams(location.hash.slice(1)).get("code");
if (code) {
  history.replaceState(null, "", location.pathname); // the code stays out of the browser's history
  document.addEventListener("DOMContentLoaded", () => {
    const form = document.querySelector("form");
    form.elements.code.value = code;
    form.submit();
  });
}
