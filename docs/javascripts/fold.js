/* On a phone, the sections of a very long page are folded: a heading opens its own, and so does a link into it. */
"use strict";

(() => {
  const NARROW = 600, LONG = 15000;  // pixels
  const article = document.querySelector("article");
  const root = document.documentElement;  // a window's inner width, on a phone, counts what is too wide while the page loads
  if (!article || root.clientWidth > NARROW || root.scrollHeight <= LONG) return;

  function fold(heading) {
    const section = document.createElement("div"), button = document.createElement("button");
    section.className = "fold";
    while (heading.nextElementSibling && heading.nextElementSibling.tagName !== "H2") section.append(heading.nextElementSibling);
    if (!section.children.length) return;
    heading.after(section);
    Object.assign(button, { type: "button", className: "fold-button", ariaExpanded: "false" });
    button.append(...[...heading.childNodes].filter(node => !node.classList?.contains("headerlink")));
    heading.prepend(button);
    section.hidden = true;
    button.addEventListener("click", () => show(section, section.hidden));
  }

  function show(section, open) {
    section.hidden = !open;
    section.previousElementSibling.querySelector(".fold-button").ariaExpanded = open;
  }

  function openAddressed() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    const section = target.closest(".fold") ?? (target.nextElementSibling?.matches(".fold") ? target.nextElementSibling : null);
    if (section?.hidden) {
      show(section, true);
      target.scrollIntoView();
    }
  }

  article.querySelectorAll(":scope > h2").forEach(fold);
  addEventListener("hashchange", openAddressed);
  openAddressed();
})();
