// Stored outputs of a result page: choose one, look at any cell; no model.
"use strict";
Lens.explore = function (root) {
    const part = (name) => root.querySelector(`[data-lens=${name}]`);
    const { outputs, texts } = JSON.parse(root.querySelector("script").textContent);
    if (!outputs.length) return;
    const runs = outputs.map(({ name, tokens }) => ({ name, tokens, rule: null, text: (id) => texts[id] }));
    let shown = runs[0];
    const details = (index, layer) => Lens.showDetails(part("details"), shown, index, layer);
    const grid = new Lens.Grid(part("grid"), details);

    function show(number) {
        shown = runs[number];
        grid.clear(shown.tokens[0].ids.length - 1, `A row per token, a column per layer. ${shown.name}`);
        shown.tokens.forEach((_, index) => grid.add(shown, index));
        grid.mark(shown, null);
        details(0, grid.layers);
    }

    part("output").append(...runs.map(({ name }, number) => Lens.option(number, name)));
    part("output").addEventListener("change", () => show(part("output").value));
    show(0);
    root.hidden = false;
};
document.querySelectorAll("[data-lens-explore]").forEach(Lens.explore);
