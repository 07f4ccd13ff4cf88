// The look: that of the system until the button is used. Works without the drawing scripts.
(() => {
  "use strict";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const current = () => root.dataset.theme || (system.matches ? "dark" : "light");
  const tell = () => {
    const other = current() === "dark" ? "light" : "dark";
    button.textContent = other === "dark" ? "Dark" : "Light";
    button.setAttribute("aria-label", `Change to the ${other} look`);
    document.dispatchEvent(new CustomEvent("leakscope:theme"));
  };
  button.addEventListener("click", () => {
    root.dataset.theme = current() === "dark" ? "light" : "dark";
    tell();
  });
  system.addEventListener("change", tell);
  button.hidden = false;
  tell();

  // A link to a folded section unfolds it; so does printing, for all of them.
  const unfold = () => {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    const own = target && target.querySelector(":scope > details");
    if (own) own.open = true;
  };
  addEventListener("hashchange", unfold);
  unfold();
  // Paper is light.
  let looked;
  addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("main details")) folded.open = true;
    looked = root.dataset.theme;
    root.dataset.theme = "light";
    tell();
  });
  addEventListener("afterprint", () => {
    if (looked) root.dataset.theme = looked;
    else delete root.dataset.theme;
    tell();
  });
})();
