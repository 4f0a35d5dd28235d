// A field above each long table that hides the rows without the words typed.
document$.subscribe(() => {
  for (const table of document.querySelectorAll("article table:not(.filtered)")) {
    const rows = [...table.tBodies[0].rows];
    table.classList.add("filtered");
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
