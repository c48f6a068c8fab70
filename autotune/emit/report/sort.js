"use strict";
// Headings of a table marked "sortable" become buttons. Without scripts the table stays as it was written: by number.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const key = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  const compare = (a, b) => (a === "" || b === "" || isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const sign = heading.ariaSort === "ascending" ? -1 : 1;
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const rows = [...body.rows].map((row) => [key(row, column), row]);
      const known = rows.filter(([value]) => value !== "").sort(([a], [b]) => sign * compare(a, b));
      body.append(...[...known, ...rows.filter(([value]) => value === "")].map(([, row]) => row)); // unknown ones last
    });
  });
}
