(function () {
  "use strict";
  // Okabe and Ito's colours, ordered by contrast on each background. Dashes and markers also
  // distinguish the series.
  var LIGHT = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"];
  var DARK = ["#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#FFFFFF"];
  var DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  var MARKERS = ["circle", "square", "diamond", "triangle-up", "x", "cross", "star"];
  var PATTERNS = ["", "/", "x", "-", "+", "."];
  var PRINT_WIDTH = 660;
  var figures = JSON.parse(document.getElementById("figures").textContent);
  var printing = false, ready = false;
  var darkQuery = window.matchMedia("(prefers-color-scheme: dark)");

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function theme() {
    if (printing) {
      return { palette: LIGHT, ink: "#1c2330", soft: "#4a5261", grid: "#e8e6e0", card: "#ffffff" };
    }
    return {
      palette: darkQuery.matches ? DARK : LIGHT,
      ink: colour("--ink"), soft: colour("--soft"), grid: colour("--grid"), card: colour("--card")
    };
  }

  function faded(hex, alpha) {
    var n = parseInt(hex.slice(1), 16);
    return "rgba(" + (n >> 16) + "," + ((n >> 8) & 255) + "," + (n & 255) + "," + alpha + ")";
  }

  function styled(trace, look) {
    var out = Object.assign({}, trace), meta = trace.meta || {}, i = meta.series || 0;
    var hue = look.palette[i % look.palette.length];
    if (meta.role === "band") {
      out.fillcolor = faded(hue, 0.16);
      out.line = { width: 0, color: hue };
    } else if (meta.role === "line") {
      out.line = { color: hue, width: 2.2, dash: meta.dash || DASHES[i % DASHES.length] };
      if (meta.shape) { out.line.shape = meta.shape; out.line.dash = meta.dash || "solid"; out.fill = "tozeroy"; out.fillcolor = faded(hue, 0.12); }
      out.marker = Object.assign({}, trace.marker, { color: hue, size: 7, symbol: MARKERS[i % MARKERS.length] });
    } else if (meta.role === "bar") {
      out.marker = {
        color: faded(hue, 0.85), line: { width: 0 },
        pattern: { shape: PATTERNS[i % PATTERNS.length], fillmode: "overlay", fgcolor: look.card, fgopacity: 0.8, size: 6, solidity: 0.25 }
      };
    } else if (meta.role === "map") {
      out.colorbar = Object.assign({}, trace.colorbar, { tickfont: { color: look.soft } });
      out.colorbar.title = Object.assign({}, trace.colorbar.title, { font: { color: look.soft, size: 12 } });
    }
    return out;
  }

  function axis(given, look) {
    var out = Object.assign({
      gridcolor: look.grid, zerolinecolor: look.grid, linecolor: look.grid, tickfont: { color: look.soft },
      automargin: true, fixedrange: narrow()
    }, given);
    out.title = Object.assign({ font: { color: look.soft, size: 13 }, standoff: 10 }, given.title || {});
    return out;
  }

  function narrow() {
    return !printing && window.innerWidth < 560;
  }

  function layoutOf(spec, look) {
    var out = Object.assign({}, spec.layout), marks = out.marks || [];
    delete out.marks;
    out.font = { family: getComputedStyle(document.body).fontFamily, size: 13, color: look.ink };
    out.paper_bgcolor = out.plot_bgcolor = look.card;
    out.xaxis = axis(spec.layout.xaxis, look);
    out.yaxis = axis(spec.layout.yaxis, look);
    var across = narrow() ? 1 : spec.wide ? 5 : 3;
    var many = spec.data.filter(function (t) { return t.showlegend !== false; }).length;
    out.height = spec.height + 22 * Math.max(0, Math.ceil(many / across) - 1 - (narrow() ? 1 : 0));
    out.uirevision = "kept";
    out.hovermode = spec.data.some(function (t) { return t.type === "heatmap"; }) ? "closest" : "x unified";
    out.hoverlabel = { bgcolor: look.card, bordercolor: look.grid, font: { color: look.ink } };
    var named = spec.data.filter(function (t) { return t.showlegend !== false && t.type !== "heatmap"; });
    out.showlegend = named.length > 1;
    out.margin = { l: 8, r: 12, t: out.showlegend ? 40 : 10, b: 8 };
    out.legend = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12.5, color: look.ink }, bgcolor: "rgba(0,0,0,0)" };
    if (narrow()) { out.dragmode = false; }
    if (printing) { out.width = PRINT_WIDTH; } else { out.autosize = true; }
    out.shapes = marks.map(function (m) {
      var line = { color: look.soft, width: 1.5, dash: "dot" };
      return m.way === "x"
        ? { type: "line", x0: m.value, x1: m.value, y0: 0, y1: 1, yref: "paper", line: line }
        : { type: "line", y0: m.value, y1: m.value, x0: 0, x1: 1, xref: "paper", line: line };
    });
    out.annotations = marks.map(function (m) {
      var note = { text: m.text, showarrow: false, font: { color: look.soft, size: 12 } };
      if (m.way === "x") {
        var at = out.xaxis.type === "log" ? Math.log10(m.value) : m.value;
        return Object.assign(note, { x: at, y: 1, yref: "paper", xanchor: "left", yanchor: "top", xshift: 5 });
      }
      return Object.assign(note, { y: m.value, x: 0, xref: "paper", xanchor: "left", yanchor: "bottom", xshift: 4 });
    });
    return out;
  }

  function drawn(id) {
    var look = theme(), spec = figures[id];
    return { data: spec.data.map(function (t) { return styled(t, look); }), layout: layoutOf(spec, look) };
  }

  function draw(element) {
    var spec = figures[element.dataset.figure];
    if (!spec) { return; }
    var made = drawn(element.dataset.figure);
    Plotly.react(element, made.data, made.layout, { displayModeBar: false, responsive: true, displaylogo: false });
  }

  function drawAll() {
    if (!ready) { return; }
    document.querySelectorAll(".plot[data-figure]").forEach(draw);
    document.body.dataset.drawn = document.querySelectorAll(".plot .main-svg").length;
  }

  function save(name, text, kind) {
    var link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind }));
    link.download = name;
    link.click();
    setTimeout(function () { URL.revokeObjectURL(link.href); }, 1000);
  }

  function csv(spec) {
    function cell(value) {
      if (value === null || value === undefined) { return ""; }
      // A spreadsheet would run a text that begins like a formula.
      var text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? "'" + value : String(value);
      return /[",\n\r]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text;
    }
    return [spec.head].concat(spec.rows).map(function (row) { return row.map(cell).join(","); }).join("\n") + "\n";
  }

  function image(id, format, title) {
    var made = drawn(id);
    made.layout.title = { text: title, x: 0.02, xanchor: "left", font: { size: 18 } };
    made.layout.margin = { l: 20, r: 24, t: 90, b: 20 };
    delete made.layout.autosize;
    var high = Math.max(540, figures[id].height);
    Plotly.downloadImage(made, { format: format, filename: figures[id].name, width: 960, height: high, scale: format === "png" ? 2 : 1 });
  }

  function numbers(box, spec) {
    var shown = 500, table = document.createElement("table");
    function line(words, kind, parent) {
      var row = parent.appendChild(document.createElement("tr"));
      words.forEach(function (word) {
        var cell = row.appendChild(document.createElement(kind));
        cell.textContent = typeof word === "number" && !Number.isInteger(word) ? Number(word.toPrecision(5)) : word === null ? "" : word;
      });
    }
    line(spec.head, "th", table.appendChild(document.createElement("thead")));
    var body = table.appendChild(document.createElement("tbody"));
    spec.rows.slice(0, shown).forEach(function (row) { line(row, "td", body); });
    box.replaceChildren(table);
    if (spec.rows.length > shown) {
      box.append("The first " + shown + " of " + spec.rows.length + " lines; the CSV file has all.");
    }
  }

  // Boxes of tables: `wide` if the table does not fit, `more` if columns follow to the right.
  var BOXES = ".scroll, .tools details > div";
  function mark(box) {
    var hidden = box.scrollWidth - box.clientWidth;
    box.toggleAttribute("data-wide", hidden > 1);
    box.toggleAttribute("data-more", hidden - box.scrollLeft > 1);
  }
  function markAll() {
    document.querySelectorAll(BOXES).forEach(mark);
  }
  document.addEventListener("scroll", function (event) {
    if (event.target.matches && event.target.matches(BOXES)) { mark(event.target); }
  }, true);
  window.addEventListener("resize", markAll);

  document.addEventListener("click", function (event) {
    var button = event.target.closest("button[data-do]");
    if (!button) { return; }
    var card = button.closest(".card"), id = card.querySelector(".plot").dataset.figure;
    if (button.dataset.do === "csv") { save(figures[id].name + ".csv", csv(figures[id]), "text/csv"); }
    else { image(id, button.dataset.do, card.querySelector("h3").textContent.replace(/</g, "&lt;")); }
  });
  document.addEventListener("toggle", function (event) {
    var card = event.target.closest ? event.target.closest(".card") : null;
    if (card && event.target.open && card.querySelector(".plot")) {
      numbers(event.target.querySelector("div"), figures[card.querySelector(".plot").dataset.figure]);
      markAll();
    }
  }, true);

  function forPrint(on) {
    if (printing !== on) { printing = on; drawAll(); }
  }
  window.addEventListener("beforeprint", function () { forPrint(true); });
  window.addEventListener("afterprint", function () { forPrint(false); });
  window.matchMedia("print").addEventListener("change", function (event) { forPrint(event.matches); });
  darkQuery.addEventListener("change", drawAll);

  // While a run is in progress, changed parts are replaced; zoom and open tables stay.
  function shape(root) {
    return Array.from(root.querySelectorAll("[data-part],[data-figure]"), function (e) {
      return e.dataset.part || e.dataset.figure;
    }).join();
  }
  function put(state) {
    var fresh = new DOMParser().parseFromString(state.html, "text/html"), main = document.getElementById("main");
    figures = state.figures;
    if (shape(fresh) === shape(main)) {
      fresh.querySelectorAll("[data-part]").forEach(function (part) {
        var old = main.querySelector('[data-part="' + part.dataset.part + '"]');
        if (old.innerHTML !== part.innerHTML) { old.innerHTML = part.innerHTML; }
      });
    } else {
      main.innerHTML = fresh.getElementById("main").innerHTML;
    }
    drawAll();
    document.querySelectorAll(".tools details[open]").forEach(function (d) {
      numbers(d.querySelector("div"), figures[d.closest(".card").querySelector(".plot").dataset.figure]);
    });
    markAll();
  }
  var version = document.body.dataset.version;
  function poll() {
    fetch("state.json?seen=" + version, { cache: "no-store" }).then(function (answer) {
      document.querySelectorAll(".live").forEach(function (e) { e.classList.remove("lost"); });
      return answer.status === 200 ? answer.json() : null;
    }).then(function (state) {
      if (state) { version = state.version; put(state); }
      setTimeout(poll, 1500);
    }).catch(function () {
      document.querySelectorAll(".live").forEach(function (e) { e.classList.add("lost"); });
      setTimeout(poll, 4000);
    });
  }

  // The drawing library is compressed. The page's policy has its hash, so no other script runs.
  function unpack() {
    var letters = atob(document.getElementById("library").textContent), bytes = new Uint8Array(letters.length);
    for (var i = 0; i < letters.length; i++) { bytes[i] = letters.charCodeAt(i); }
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }
  function start() {
    if (!window.DecompressionStream) { throw new Error("DecompressionStream"); }
    return unpack().then(function (code) {
      var script = document.createElement("script");
      script.textContent = code;
      document.head.append(script);
      ready = true;
      drawAll();
      if (version) { setTimeout(poll, 1500); }
    });
  }
  markAll();
  Promise.resolve().then(start).catch(function (error) {
    console.error(error);
    document.querySelectorAll(".plot").forEach(function (plot) {
      plot.textContent = "This browser cannot draw the figure (" + error.message + "); its numbers are below.";
    });
  });
})();
