// Numbers in tables stay on one line, and a field above each long table hides the rows without the
// words typed.
document$.subscribe(() => {
  for (const table of document.querySelectorAll("article table:not([data-filter])")) {
    const rows = [...table.tBodies[0].rows];
    // A class would take the theme's style off the table.
    table.dataset.filter = "";
    for (const cell of table.querySelectorAll("td")) {
      const text = cell.textContent.trim();
      if (text.length <= 16 && /^[-+−]?\d/.test(text)) cell.style.whiteSpace = "nowrap";
    }
    if (rows.length < 20) continue;
    const field = document.createElement("input");
    field.type = "search";
    field.placeholder = "Filter the rows";
    field.setAttribute("aria-label", "Filter the rows of this table");
    field.className = "table-filter";
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/);
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
    const frame = table.closest(".md-typeset__scrollwrap") ?? table;
    frame.before(field);
  }
});
