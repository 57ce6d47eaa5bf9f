"use strict";
// Read-out under the pointer and lines that the legend switches; the page is complete without it.
(() => {
  const trim = (v) => String(Number(v.toPrecision(5)));
  const scaled = (v, units, base) => {
    let i = 0;
    while (Math.abs(v) >= 999.5 && i < units.length - 1) { v /= 1000; i += 1; }
    return (i === 0 ? base(v) : v.toPrecision(3)) + (units[i] ? " " + units[i] : "");
  };
  const format = {
    number: trim,
    log_count: (v) => format.count(10 ** v),
    log_seconds: (v) => format.seconds(10 ** v),
    log_gbit: (v) => trim(10 ** v) + " Gbit/s",
    seconds: (v) => (v < 1 ? trim(v * 1e3) + " ms" : trim(v) + " s"),
    bytes: (v) => scaled(v, ["B", "kB", "MB", "GB", "TB", "PB"], (b) => b.toFixed(0)),
    count: (v) => (Math.abs(v) < 1e4 ? trim(v) : scaled(v, ["", "k", "M", "G", "T"], trim)),
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const mid = (low + high) >> 1;
      if (xs[mid] < x) low = mid; else high = mid;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };
  const row = (label, value, colour) => {
    const div = document.createElement("div");
    if (colour !== undefined) {
      div.className = "c" + colour;
      div.append(document.createElement("i"));
    }
    const strong = document.createElement("b");
    strong.textContent = value;
    div.append(label, strong);
    return div;
  };

  for (const figure of document.querySelectorAll("figure.chart")) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const plot = figure.querySelector(".plot");
    const cursor = figure.querySelector(".cursor");
    const tip = figure.querySelector(".tip");
    const off = new Set();

    for (const button of figure.querySelectorAll(".legend button")) {
      button.addEventListener("click", () => {
        const name = button.textContent;
        const show = off.delete(name);
        if (!show) off.add(name);
        button.setAttribute("aria-pressed", String(show));
        for (const g of figure.querySelectorAll("svg g")) {
          if (g.dataset.name === name) g.style.display = show ? "" : "none";
        }
      });
    }

    const hide = () => { cursor.hidden = tip.hidden = true; };
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const part = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
      const span = data.to - data.from;
      const x = data.from + part * span;
      const rows = [];
      let at = null;
      for (const line of data.lines) {
        if (off.has(line.name) || line.x.length === 0) continue;
        const i = nearest(line.x, x);
        // A line that ends far from the pointer has nothing to say here.
        if (line.y[i] === null || Math.abs(line.x[i] - x) > 0.04 * span) continue;
        if (at === null || Math.abs(line.x[i] - x) < Math.abs(at - x)) at = line.x[i];
        rows.push(row(line.name, format[data.y](line.y[i]), line.colour));
      }
      if (at === null) { hide(); return; }
      tip.replaceChildren(row(data.label, format[data.x](at)), ...rows);
      cursor.style.left = 100 * (at - data.from) / span + "%";
      cursor.hidden = tip.hidden = false;
      const left = (at - data.from) / span * box.width;
      const flip = left > box.width / 2;
      tip.style.left = flip ? "" : left + 10 + "px";
      tip.style.right = flip ? box.width - left + 10 + "px" : "";
    });
  }
})();
