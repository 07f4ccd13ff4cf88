// Chains: names are cut to the width that there is, and again when that changes.
leakscope.behaviours.ladder = (element, figure, extra) => {
  "use strict";
  const nodes = figure.data.find((trace) => trace.mode === "markers+text");
  const whole = nodes.text;
  const plain = (label) => label.replace(/<\/?b>/g, "").replace(/&(lt|gt|amp);/g, "x");
  const fit = () => {
    const room = Math.max(12, Math.floor((leakscope.plotOf(element).clientWidth * (1 - extra.node) - 20) / 7.4));
    nodes.text = whole.map((label) => {
      const shown = plain(label);
      if (shown.length <= room) return label;
      // Cut between entities: letters of the label are counted, markup is not.
      const bold = label.includes("<b>");
      const pieces = label.replace(/<\/?b>/g, "").match(/&(?:lt|gt|amp);|[\s\S]/gu);
      const text = `${pieces.slice(0, room - 1).join("")}…`;
      return bold ? `<b>${text}</b>` : text;
    });
    leakscope.redraw(element);
  };
  let width = 0;
  new ResizeObserver(() => {
    const now = leakscope.plotOf(element).clientWidth;
    if (now !== width) {
      width = now;
      fit();
    }
  }).observe(leakscope.plotOf(element));
};
