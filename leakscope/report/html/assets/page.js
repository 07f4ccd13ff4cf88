// Draws figures when they are scrolled to, in the colours of the look, and lets behaviours (leakscope.behaviours)
// change what is drawn: leakscope.redraw(element).
var leakscope = (() => {
  "use strict";
  const drawn = new Map(); // <figure> -> {data, layout}
  const behaviours = {};
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const config = { displaylogo: false, responsive: true, showTips: false };

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // "var(--name)" anywhere in a figure becomes the colour of the look. Arrays of numbers are left as they are.
  const coloured = (value) => {
    if (typeof value === "string") return value.replace(/var\((--[a-z0-9-]+)\)/g, (_, name) => colour(name) || "#888");
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map(coloured);
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, coloured(inner)]));
    return value;
  };

  const template = () => {
    const ink = colour("--ink"), soft = colour("--soft"), line = colour("--line"), paper = colour("--card");
    const axis = {
      color: soft, gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true,
      title: { font: { color: soft, size: 13 } }, tickfont: { color: soft, size: 12 },
    };
    return {
      layout: {
        font: { family: colour("--face"), size: 13, color: ink },
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", xaxis: axis, yaxis: axis,
        hoverlabel: { bgcolor: paper, bordercolor: soft, font: { color: ink, family: colour("--face"), size: 13 }, align: "left", namelength: -1 },
        legend: { font: { color: ink }, bgcolor: "rgba(0,0,0,0)" },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink },
        colorway: [1, 2, 3, 4, 5, 6, 7, 8].map((n) => colour(`--series-${n}`)),
        margin: { l: 56, r: 16, t: 16, b: 40 },
      },
    };
  };

  const plotOf = (element) => element.querySelector(".plot");

  const redraw = (element) => {
    const figure = drawn.get(element);
    if (!figure) return Promise.resolve();
    const layout = coloured(figure.layout);
    layout.template = template();
    if (calm.matches) layout.transition = { duration: 0 };
    const plot = plotOf(element);
    return Plotly.react(plot, coloured(figure.data), layout, config).then(() => {
      for (const svg of plot.querySelectorAll("svg.main-svg")) svg.setAttribute("aria-hidden", "true");
    });
  };

  // On a narrow page the names of the legend stand below each other: the figure grows by them.
  const roomForLegend = (element, { data, layout }) => {
    const plot = plotOf(element);
    if (plot.clientWidth > 640 || layout.showlegend === false || layout.legend?.orientation !== "h") return;
    const names = data.filter((trace) => trace.name && trace.showlegend !== false).length;
    plot.style.height = `${plot.clientHeight + 21 * names}px`;
    layout.legend.font = { size: 11 };
  };

  const draw = (element) => {
    if (drawn.has(element)) return;
    const { data, layout, extra } = JSON.parse(document.getElementById(`json-${element.id}`).textContent);
    const figure = { data, layout };
    drawn.set(element, figure);
    roomForLegend(element, figure);
    element.dataset.state = "drawing";
    redraw(element).then(() => {
      const behave = behaviours[element.dataset.behaviour];
      if (behave) behave(element, figure, extra);
      element.dataset.state = "drawn";
    });
  };

  const start = () => {
    const figures = document.querySelectorAll("figure.figure");
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries)
        if (entry.isIntersecting) {
          seen.unobserve(entry.target);
          draw(entry.target);
        }
    }, { rootMargin: "200px" });
    for (const figure of figures) seen.observe(figure);
    document.addEventListener("leakscope:theme", () => {
      for (const element of drawn.keys()) redraw(element);
    });
    addEventListener("beforeprint", () => figures.forEach(draw));
  };
  if (document.readyState === "loading") addEventListener("DOMContentLoaded", start);
  else start();

  return { behaviours, redraw, colour, plotOf };
})();
