// Icicles and flame graphs of stacks: layer, measure, direction, search and zoom. The page holds the whole tree as
// tables (icicle.py); here it is turned into the tree that is looked at, of which plotly draws the widest nodes.
leakscope.behaviours.icicle = (element, figure, extra) => {
  "use strict";
  const MAX_DRAWN = 900; // nodes at once: plotly takes 1.5 s for them
  const MAX_FILLERS = 60; // of them, for "N smaller"
  const MAX_ROWS = 34; // deeper frames come on click
  const ROW_PX = 21;
  const LEAST_SHARE = 1 / 2500; // narrower than half a pixel
  const LISTED = 10;
  const FADED = "rgba(138,146,160,.22)", FOUND = "#ff5fb0", INK = "#16191f", LAYER = "#c3cad5";
  const plot = leakscope.plotOf(element);
  const { texts, kinds, frameText, frameKind, parent, frame, measures, roots, sources, difference } = extra;
  const merged = new Map(extra.merged);
  const sampled = new Set(extra.sampled);

  // --- numbers as the terminal writes them
  const size = (value) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let amount = Math.abs(value), unit = 0;
    while (amount >= 1023.95 && unit < units.length - 1) { amount /= 1024; unit += 1; }
    const tenths = amount * 10, even = Math.round(tenths / 2) * 2; // halves to even, as Python does it
    const number = unit ? ((tenths % 1 === 0.5 ? even : Math.round(tenths)) / 10).toFixed(1) : amount.toFixed(0);
    return `${value < 0 && Number(number) ? "-" : ""}${number} ${units[unit]}`;
  };
  const counted = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 3 });
  const short = (value, unit) => (unit === "objects" ? counted(value) : unit === "bytes/s" ? `${size(value)}/s` : size(value));
  const exact = (value, unit) =>
    unit === "objects" ? `${counted(value)} ${value === 1 ? "object" : "objects"}`
      : unit === "bytes/s" ? `${counted(value)} B/s${Math.abs(value) < 1024 ? "" : ` (${size(value)}/s)`}`
        : `${counted(Math.round(value))} B${Math.abs(value) < 1024 ? "" : ` (${size(value)})`}`;
  const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "0 %");

  // --- the tree that is looked at
  const rootOf = [];
  parent.forEach((up, node) => rootOf.push(up < 0 ? node : rootOf[up]));
  const amounts = new Map(); // node of the tables → its amounts by measure
  measures.forEach(({ node, own }, m) => node.forEach((at, i) => {
    if (!amounts.has(at)) amounts.set(at, new Float64Array(measures.length));
    amounts.get(at)[m] = own[i];
  }));
  const newNode = (up, frameOf, label) => ({
    up, frame: frameOf, label, children: new Map(), sums: new Float64Array(measures.length),
    estimated: false, merged: 0, depth: up ? up.depth + 1 : 0,
  });
  const below = (node, key, frameOf, label) => {
    let child = node.children.get(key);
    if (!child) node.children.set(key, (child = newNode(node, frameOf, label)));
    return child;
  };
  const build = () => {
    const all = state.layer === "all";
    const top = newNode(null, -1, all ? "all layers" : state.layer);
    for (const [node, own] of amounts) {
      const root = roots[rootOf[node]];
      if (root.source !== state.source || (all ? !root.together : root.layer !== state.layer)) continue;
      const path = [];
      for (let at = node; parent[at] >= 0; at = parent[at]) path.push(frame[at]);
      if (!state.callees) path.reverse();
      let at = top;
      const along = [top];
      if (all) along.push((at = below(at, `layer ${root.layer}`, -1, root.layer)));
      for (const step of path) along.push((at = below(at, step, step, "")));
      for (const one of along) {
        if (kindOf(one) === SMALLER) one.merged += merged.get(node) || 0;
        for (let m = 0; m < own.length; m++) one.sums[m] += own[m];
        if (sampled.has(node)) one.estimated = true;
      }
    }
    return top;
  };
  const value = (node) => node.sums[state.measure];
  const childrenOf = (node) => [...node.children.values()].filter((c) => value(c) > 0).sort((a, b) => value(b) - value(a));
  const nameOf = (node) =>
    node.frame < 0 ? node.label : kindOf(node) === SMALLER ? `(${counted(node.merged)} smaller)` : texts[frameText[node.frame]];
  const kindOf = (node) => (node.frame < 0 ? null : kinds[frameKind[node.frame]]);
  const SMALLER = kinds.find((kind) => kind.word.startsWith("smaller"));
  const net = (node) => node.sums[difference.after] - node.sums[difference.before];
  const sides = (node) => [difference.before, difference.after].map((m) => `${measures[m].name} ${exact(node.sums[m], measures[m].unit)}`).join(", ");
  const shade = (node) => leakscope.icicleShade(node.sums[difference.gain] - node.sums[difference.loss], node.sums[difference.change]);
  const signed = (amount) => `${amount > 0 ? "+" : ""}${size(amount)}`;

  // --- state
  const layersOf = (source) => {
    const of = roots.filter((r) => r.source === source);
    const together = new Set(of.filter((r) => r.together).map((r) => r.layer));
    return [...(together.size > 1 ? ["all"] : []), ...new Set(of.map((r) => r.layer))];
  };
  const state = { source: 0, layer: layersOf(0)[0], measure: measures.findIndex((m) => m.widths), callees: false, up: false, query: "" };
  let top = null, focus = null;

  // --- search: frames that match; what is found is the sum over the outermost of them, so that no byte counts twice
  const search = () => {
    const query = state.query.trim().toLowerCase();
    if (!query) return null;
    const hits = texts.map((text) => text.toLowerCase().includes(query));
    const found = new Set(), around = new Set();
    let sum = 0, frames = 0;
    const matches = (node) => node.frame >= 0 && hits[frameText[node.frame]];
    const walk = [[focus, false]];
    while (walk.length) {
      const [node, inside] = walk.pop();
      const hit = matches(node);
      if (hit) {
        found.add(node);
        frames += 1;
        if (!inside) {
          sum += value(node);
          for (let at = node.up; at; at = at.up) around.add(at);
        }
      }
      for (const child of node.children.values()) if (value(child) > 0) walk.push([child, inside || hit]);
    }
    return { found, around, sum, frames };
  };

  // --- what of it is drawn: the widest nodes in reach, parents before children
  const choose = () => {
    const whole = value(focus);
    const reach = [];
    const walk = [focus];
    while (walk.length) {
      const node = walk.pop();
      reach.push(node);
      if (node.depth - focus.depth + 1 < MAX_ROWS)
        for (const child of childrenOf(node)) if (value(child) >= whole * LEAST_SHARE) walk.push(child);
    }
    reach.sort((a, b) => value(b) - value(a) || a.depth - b.depth);
    return reach.slice(0, MAX_DRAWN - MAX_FILLERS);
  };
  // Labels are plotly's, which reads a little markup.
  const inert = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const fitting = (text, width) => {
    const most = Math.floor((width - 8) / 6.6);
    return most < 3 ? "" : inert(text.length <= most ? text : `${text.slice(0, most - 1)}…`);
  };
  const brief = (text) => text.replace(/ \((?:[^()]*\/)?([^()/]+)\)$/, " ($1)"); // of a file its name alone
  const wrapped = (text) => (text.length > 400 ? `${text.slice(0, 260)} … ${text.slice(-130)}` : text).replace(/.{88}/g, "$&\n");
  const fillOf = (node, found) => {
    if (found && found.found.has(node)) return FOUND;
    if (found && !found.around.has(node)) return FADED;
    if (difference) return shade(node);
    return node.frame < 0 ? LAYER : kindOf(node).fill;
  };
  const hoverOf = (node, found) => {
    const lines = [wrapped(nameOf(node)), node.frame < 0 ? "layer" : kindOf(node).word];
    if (difference) {
      lines.push(`net ${signed(net(node))}: ${sides(node)}`);
      if (!node.sums[difference.gain] && !node.sums[difference.loss]) lines.push(net(node) ? "within chance" : "as before");
    } else lines.push(...measures.map((m, i) => (i === state.measure ? "" : `${m.name}: ${exact(node.sums[i], m.unit)}`)).filter(Boolean));
    const { name, unit } = measures[state.measure];
    lines.splice(2, 0, `${name}: ${exact(value(node), unit)}, ${percent(value(node), value(focus))} of ${node === focus ? "this view" : "the width"}`);
    if (node.estimated) lines.push("≈ in part an estimate from a sample");
    if (found && found.found.has(node)) lines.push("matches the search");
    return inert(lines.join("\n")).replace(/\n/g, "<br>");
  };
  const draw = () => {
    const found = search();
    const nodes = choose();
    const id = new Map(nodes.map((node, i) => [node, i]));
    const whole = value(focus), room = (drawnFor = controls.clientWidth || 800);
    const t = { ids: [], parents: [], values: [], labels: [], hovertext: [], colors: [], inks: [], edges: [], of: [] };
    const put = (name, up, amount, label, hover, fill, of) => {
      t.ids.push(name); t.parents.push(up); t.values.push(amount); t.hovertext.push(hover); t.colors.push(fill);
      t.labels.push(fitting(label, (room * amount) / whole)); t.inks.push(fill === FADED ? "var(--soft)" : INK); t.of.push(of);
      t.edges.push((room * amount) / whole < 4 ? 0 : 1); // an edge would hide what is narrow
    };
    let rows = 1, fillers = 0;
    // Numbers with a fraction may add up to a hair more than their sum, which plotly refuses.
    const least = new Map();
    for (let i = nodes.length - 1; i > 0; i--) {
      const node = nodes[i];
      least.set(node.up, (least.get(node.up) || 0) + Math.max(value(node), least.get(node) || 0));
    }
    for (const node of nodes) {
      const deeper = node.depth - focus.depth + 1 === MAX_ROWS && childrenOf(node).length;
      const label = `${difference ? `${signed(net(node))} ` : ""}${node.estimated ? "≈ " : ""}${brief(nameOf(node))}${deeper ? " …" : ""}`;
      rows = Math.max(rows, node.depth - focus.depth + 1);
      put(`n${id.get(node)}`, node === focus ? "" : `n${id.get(node.up)}`, Math.max(value(node), least.get(node) || 0), label, hoverOf(node, found), fillOf(node, found), node);
    }
    for (const node of nodes) {
      if (fillers === MAX_FILLERS || node.depth - focus.depth + 1 === MAX_ROWS) continue;
      const left = childrenOf(node).filter((child) => !id.has(child));
      const sum = left.reduce((total, child) => total + value(child), 0);
      if (!left.length || sum < whole * LEAST_SHARE) continue;
      const hit = found && left.some((child) => found.found.has(child) || found.around.has(child));
      const room_ = Math.min(sum, value(node) - (least.get(node) || 0));
      if (room_ <= 0) continue;
      fillers += 1;
      rows = Math.max(rows, node.depth - focus.depth + 2);
      put(`f${fillers}`, `n${id.get(node)}`, room_, `(${left.length} narrower)`, inert(`${left.length} narrower branches of ${wrapped(nameOf(node))}`).replace(/\n/g, "<br>"), hit ? FOUND : found ? FADED : SMALLER.fill, node);
    }
    drawn = t.of;
    const height = Math.max(3, rows) * ROW_PX + 8;
    plot.style.height = `${height}px`;
    figure.data = [{
      type: "icicle", ids: t.ids, parents: t.parents, values: t.values, labels: t.labels, hovertext: t.hovertext,
      branchvalues: "total", sort: false, hoverinfo: "text", textinfo: "label", textposition: "middle left",
      tiling: { orientation: "v", flip: state.up ? "y" : "", pad: 0 }, pathbar: { visible: false },
      marker: { colors: t.colors, line: { width: t.edges, color: "var(--card)" } },
      insidetextfont: { color: t.inks, size: 12 }, outsidetextfont: { color: t.inks, size: 12 }, leaf: { opacity: 1 },
    }];
    figure.layout = { margin: { l: 0, r: 0, t: 2, b: 2 }, height };
    tell(found);
    Object.assign(element.dataset, { nodes: t.ids.length, query: state.query, drawings: Number(element.dataset.drawings || 0) + 1 });
    return leakscope.redraw(element);
  };
  let drawn = [], drawnFor = 0; // the nodes by their order in plotly, the width that labels were cut for

  // --- controls
  const make = (tag, attributes = {}, ...inside) => {
    const made = document.createElement(tag);
    for (const [name, set] of Object.entries(attributes)) if (set !== null) made.setAttribute(name, set);
    made.append(...inside);
    return made;
  };
  const bdi = (text) => make("bdi", {}, text);
  const controls = element.querySelector(".controls");
  const option = (label, choices, chosen, set) => {
    const select = make("select", {}, ...choices.map(([key, word]) => make("option", { value: key }, word)));
    select.value = chosen;
    select.addEventListener("change", () => set(select.value));
    const labelled = make("label", { class: "choice" }, `${label} `, select);
    labelled.hidden = choices.length < 2;
    controls.append(labelled);
    return { select, labelled };
  };
  const toggle = (label, title, key, rebuilds) => {
    const button = make("button", { type: "button", "aria-pressed": "false", title }, label);
    button.addEventListener("click", () => {
      state[key] = !state[key];
      button.setAttribute("aria-pressed", String(state[key]));
      if (rebuilds) rebuild();
      else draw();
    });
    controls.append(button);
  };
  const layerWords = (source) => layersOf(source).map((layer) => [layer, layer === "all" ? "all layers" : layer]);
  option("Evidence", sources.map((name, i) => [String(i), name]), "0", (chosen) => {
    state.source = Number(chosen);
    state.layer = layersOf(state.source)[0];
    layers.select.replaceChildren(...layerWords(state.source).map(([key, word]) => make("option", { value: key }, word)));
    layers.labelled.hidden = layersOf(state.source).length < 2;
    rebuild();
  });
  const layers = option("Layer", layerWords(0), state.layer, (chosen) => { state.layer = chosen; rebuild(); });
  option("Width", measures.map((m, i) => [String(i), m.name]).filter((_, i) => measures[i].widths), String(state.measure), (chosen) => {
    state.measure = Number(chosen);
    while (focus.up && !value(focus)) focus = focus.up;
    draw();
  });
  toggle("Callees first", "Begin with what was allocated, below it who asked for it", "callees", true);
  toggle("Flame", "Grow upwards", "up", false);
  const fork = make("button", { type: "button", title: "Zoom to where the stacks part" }, "To the first fork");
  fork.addEventListener("click", () => {
    let at = focus;
    for (let only = childrenOf(at); only.length === 1 && value(only[0]) === value(at); only = childrenOf(at)) at = only[0];
    zoom(at);
  });
  const find = make("input", { type: "search", placeholder: "Search frames", "aria-label": "Search frames", size: "22", spellcheck: "false" });
  const sum = make("output", { class: "found", "aria-live": "polite" });
  let waiting = 0;
  find.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { state.query = find.value; draw(); }, 200);
  });
  controls.append(fork, find, sum);
  const crumbs = make("nav", { class: "crumbs", "aria-label": "Where you are in the stacks" });
  const here = make("p", { class: "here", "aria-live": "polite" });
  plot.before(crumbs, here);
  const legend = make("p", { class: "legend" });
  const list = make("ol", { class: "branches" });
  const listTitle = make("summary", {});
  plot.after(legend, make("details", {}, listTitle, list));

  const tell = (found) => {
    const { name, unit } = measures[state.measure];
    const path = [];
    for (let at = focus; at; at = at.up) path.unshift(at);
    const shown = path.length > 7 ? [path[0], null, ...path.slice(-5)] : path;
    crumbs.replaceChildren(...shown.map((node) => {
      if (!node) return make("span", {}, `… ${path.length - 6} …`);
      if (node === focus) return make("span", { "aria-current": "true" }, bdi(nameOf(node).slice(0, 60)));
      const button = make("button", { type: "button" }, bdi(nameOf(node).slice(0, 60)));
      button.addEventListener("click", () => zoom(node));
      return button;
    }));
    const word = focus.frame < 0 ? "" : ` (${kindOf(focus).word})`;
    const compared = difference ? `, net ${signed(net(focus))}: ${sides(focus)}` : "";
    here.replaceChildren(bdi(nameOf(focus)), `${word}: ${name} ${focus.estimated ? "≈ " : ""}${exact(value(focus), unit)}${focus === top ? "" : `, ${percent(value(focus), value(top))} of ${top.label}`}${compared}`);
    const where = focus === top ? top.label : "this branch";
    sum.textContent = !found ? "" : !found.frames ? `no frame of ${where} matches`
      : `${exact(found.sum, unit)} in ${counted(found.frames)} matching frame${found.frames === 1 ? "" : "s"}, ${percent(found.sum, value(focus))} of ${where}`;
    const children = childrenOf(focus);
    listTitle.textContent = `Branches here as a list (${Math.min(LISTED, children.length)} of ${counted(children.length)}, widest first)`;
    list.replaceChildren(...children.slice(0, LISTED).map((child) => {
      const button = make("button", { type: "button" }, bdi(nameOf(child)));
      button.addEventListener("click", () => { zoom(child); (list.querySelector("button") || crumbs.querySelector("button") || find).focus(); });
      const kind = child.frame < 0 ? "layer" : kindOf(child).word;
      return make("li", {}, button, ` ${kind}, ${exact(value(child), unit)}, ${percent(value(child), value(focus))}${difference ? `, net ${signed(net(child))}` : ""}`);
    }));
    const used = new Set(frameKind.map((kind) => kinds[kind]));
    const swatch = (fill, text) => make("span", { class: "swatch" }, make("i", { style: `background:${fill}`, "aria-hidden": "true" }), text);
    legend.replaceChildren(...(difference
      ? [swatch(leakscope.icicleShade(-1, 1), "less (-)"), swatch(leakscope.icicleShade(0, 1), "as before, or within chance"), swatch(leakscope.icicleShade(1, 1), "more (+)")]
      : kinds.filter((kind) => used.has(kind)).map((kind) => swatch(kind.fill, kind.word))));
    if (found) legend.append(swatch(FOUND, "matches the search"));
  };

  const zoom = (node) => {
    if (node === focus) node = focus.up || focus;
    focus = node;
    return draw();
  };
  const rebuild = () => {
    top = focus = build();
    return draw();
  };
  plot.tabIndex = 0;
  element.addEventListener("keydown", (event) => {
    if (event.target === find && event.key === "Escape" && find.value) { // first Escape: the search
      find.value = state.query = "";
      draw();
      event.preventDefault();
      return;
    }
    if (event.target.tagName === "SELECT" || event.altKey || event.ctrlKey || event.metaKey) return;
    const typing = event.target === find;
    const beside = (step) => {
      const all = focus.up ? childrenOf(focus.up) : [focus];
      return all[all.indexOf(focus) + step];
    };
    const onPlot = event.target === plot;
    const to = {
      Escape: () => top,
      Home: () => !typing && top,
      Backspace: () => !typing && focus.up,
      ArrowUp: () => onPlot && focus.up,
      ArrowDown: () => onPlot && childrenOf(focus)[0],
      Enter: () => onPlot && childrenOf(focus)[0],
      ArrowLeft: () => onPlot && beside(-1),
      ArrowRight: () => onPlot && beside(1),
    }[event.key];
    const node = to && to();
    if (!node) return;
    event.preventDefault();
    if (node !== focus) zoom(node);
  });
  let resized = 0;
  new ResizeObserver(() => {
    clearTimeout(resized);
    resized = setTimeout(() => { if (controls.clientWidth && Math.abs(controls.clientWidth - drawnFor) > 8) draw(); }, 150);
  }).observe(controls);
  const ready = rebuild();
  plot.on("plotly_icicleclick", (event) => {
    const node = drawn[event.points[0].pointNumber];
    if (node) setTimeout(() => zoom(node));
    return false;
  });
  return ready;
};

// Blue is less, grey as before, orange more: told apart with every common colour blindness, and by the sign in words.
leakscope.icicleShade = (net, whole) => {
  const ends = net < 0 ? [[226, 229, 234], [96, 165, 240]] : [[226, 229, 234], [245, 145, 60]];
  const share = whole > 0 ? Math.min(1, Math.abs(net) / whole) : 0;
  return `rgb(${ends[0].map((from, i) => Math.round(from + (ends[1][i] - from) * share)).join(",")})`;
};
