/* Tables with many rows: sorted by a click on a heading, filtered by words, and scrolled in a box of their own. */
"use strict";

(() => {
  const MANY = 8, LONG = 16;  // rows: to sort and filter, and to scroll

  /* What a cell sorts by: its leading number (1,024; 8k; 0.76 fa4), or null. */
  function number(text) {
    const found = text.trim().replaceAll(",", "").match(/^[-+±]?\d*\.?\d+(?:e[-+]?\d+)?(?:([kM])\b)?/i);
    return found && parseFloat(found[0].replace("±", "")) * ({ k: 1024, M: 1048576 }[found[1]] ?? 1);
  }

  function compare(one, other) {
    const numbers = [number(one), number(other)];
    if (numbers[0] !== null && numbers[1] !== null) return numbers[0] - numbers[1];
    if (numbers[0] !== null || numbers[1] !== null) return numbers[0] === null ? 1 : -1;
    return one.localeCompare(other, "en", { numeric: true });
  }

  function sort(table, heading) {
    const column = heading.cellIndex, down = heading.ariaSort === "descending";
    for (const each of heading.parentElement.cells) each.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "ascending" : "descending");
    const text = row => row.cells[column]?.textContent ?? "", empty = row => /^[–—-]?$/.test(text(row).trim());
    const rows = [...table.tBodies[0].rows];
    rows.sort((one, other) => empty(one) - empty(other) || (down ? 1 : -1) * compare(text(one), text(other)));
    table.tBodies[0].append(...rows);
  }

  function filter(table, words, count) {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean), rows = [...table.tBodies[0].rows];
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !wanted.every(word => text.includes(word));
    }
    const shown = rows.filter(row => !row.hidden).length;
    count.textContent = shown === rows.length ? `${rows.length} rows` : `${shown} of ${rows.length} rows`;
  }

  function equip(table) {
    const bar = document.createElement("div"), input = document.createElement("input"), count = document.createElement("span");
    bar.className = "table-bar";
    Object.assign(input, { type: "search", placeholder: "filter rows by words", ariaLabel: "filter rows" });
    input.addEventListener("input", () => filter(table, input.value, count));
    bar.append(input, count);
    table.before(bar);
    for (const heading of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      if (!button.textContent.trim()) button.ariaLabel = "sort by this column";
      button.addEventListener("click", () => sort(table, heading));
      heading.append(button);
    }
    table.dataset.many = "";
    if (table.tBodies[0].rows.length >= LONG) table.dataset.long = "";
    filter(table, "", count);
  }

  for (const table of document.querySelectorAll("article table:not([class])")) {
    if (table.tHead?.rows.length === 1 && table.tBodies[0]?.rows.length >= MANY) equip(table);
  }
})();
