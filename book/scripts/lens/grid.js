// The grid: a row per token, a column per layer; and the ten best of the cell that is looked at.
"use strict";

// The layer, from 1 on, from which a token's top-1 is the one that was written and stays so.
Lens.settled = function ({ id, ids }) {
    let layer = ids.length;
    while (layer > 1 && ids[layer - 1][0] === id) layer -= 1;
    return layer;
};

Lens.percent = (share) => (share > 0 && share < 0.001 ? "< 0.1%" : `${(100 * share).toFixed(1)}%`);

Lens.readout = (token, layer) => ({
    ids: token.ids[layer],
    shares: token.shares[layer],
    entropy: token.entropy[layer],
});

Lens.element = function (name, content = "", className = "") {
    const made = document.createElement(name);
    made.textContent = content; // never markup, whatever it is
    if (className) made.className = className;
    return made;
};

Lens.option = function (value, text) {
    const made = Lens.element("option", text);
    made.value = value;
    return made;
};

// A run: {tokens, rule, text}, where `text(id)` is what a token is called.
Lens.Grid = class {
    // `look(index, layer)`: a cell is looked at.
    constructor(table, look) {
        Object.assign(this, { table, look, body: table.tBodies[0] });
        const cellOf = (event) => event.target.closest("td[data-layer]");
        table.addEventListener("mouseover", (event) => this.seen(cellOf(event)));
        table.addEventListener("mouseleave", () => this.seen(this.chosen));
        table.addEventListener("focusin", (event) => this.choose(cellOf(event)));
        table.addEventListener("click", (event) => this.choose(cellOf(event)));
        table.addEventListener("keydown", (event) => this.moved(event));
    }

    // Begin a grid of layers 0..`layers`.
    clear(layers, caption) {
        this.table.caption.replaceChildren(Lens.element("span", caption));
        const names = ["written", ...Array.from({ length: layers + 1 }, (_, layer) => String(layer)), "leaves"];
        const heads = names.map((name) => {
            const head = Lens.element("th", name);
            head.scope = "col";
            return head;
        });
        this.table.tHead.rows[0].replaceChildren(...heads);
        this.body.replaceChildren();
        this.table.style.minWidth = `${10 + 2.75 * (layers + 1)}rem`;
        this.layers = layers;
        this.chosen = null;
    }

    add(run, index) {
        const token = run.tokens[index];
        const settled = run.rule ? Infinity : Lens.settled(token);
        const row = this.body.insertRow();
        const head = Lens.element("th", run.text(token.id));
        head.scope = "row";
        row.append(head);
        for (let layer = 0; layer <= this.layers; layer++) {
            const cell = row.insertCell();
            if (layer >= token.ids.length) {
                cell.className = "lens-not-run";
                cell.setAttribute("aria-label", `block ${layer} did not run`);
                continue;
            }
            const [id, share] = [token.ids[layer][0], token.shares[layer][0]];
            cell.append(Lens.element("span", run.text(id)));
            cell.dataset.layer = layer;
            cell.dataset.index = index;
            cell.tabIndex = index === 0 && layer === this.layers ? 0 : -1;
            cell.style.setProperty("--lens-share", share.toFixed(3));
            cell.classList.toggle("lens-settled", layer >= settled);
            cell.classList.toggle("lens-settles", layer === settled);
            this.name(cell, [layer ? `after block ${layer}` : "embeddings", Lens.percent(share)]);
            if (layer >= settled) this.name(cell, ["settled"]);
        }
        row.insertCell().className = "lens-leaves";
    }

    // What a cell is called beside its text.
    name(cell, parts) {
        cell.setAttribute("aria-label", [cell.getAttribute("aria-label") || cell.textContent, ...parts].join(", "));
    }

    // Mark where each token of a run leaves; `exits` null: nowhere.
    mark(run, exits) {
        this.table.classList.toggle("lens-no-gate", !exits);
        [...this.body.rows].forEach((row, index) => {
            const token = run.tokens[index];
            const exit = exits ? exits[index] : Infinity;
            for (const cell of row.querySelectorAll("td[data-layer]")) {
                const layer = Number(cell.dataset.layer);
                cell.classList.toggle("lens-exit", layer === exit);
                cell.classList.toggle("lens-spared", layer > exit);
            }
            const last = row.lastElementChild;
            last.replaceChildren();
            if (!exits) return;
            const id = token.ids[exit][0];
            const differs = id !== token.id;
            const sign = run.rule ? "" : differs ? " ≠" : " =";
            last.append(Lens.element("b", String(exit)), `${sign} ${run.text(id)}`);
            last.title = differs ? "another token than at full depth" : "";
            last.classList.toggle("lens-differs", differs);
        });
    }

    seen(cell) {
        if (!cell) return;
        this.table.querySelector(".lens-seen")?.classList.remove("lens-seen");
        cell.classList.add("lens-seen");
        this.look(Number(cell.dataset.index), Number(cell.dataset.layer));
    }

    choose(cell) {
        if (!cell) return;
        this.table.querySelector("td[tabindex='0']")?.setAttribute("tabindex", "-1");
        cell.tabIndex = 0;
        this.chosen = cell;
        this.seen(cell);
    }

    at(index, layer) {
        return this.body.querySelector(`td[data-index="${index}"][data-layer="${layer}"]`);
    }

    moved(event) {
        if (!this.chosen) return;
        const [index, layer] = [Number(this.chosen.dataset.index), Number(this.chosen.dataset.layer)];
        const last = (row) => (this.body.rows[row]?.querySelectorAll("td[data-layer]").length ?? 0) - 1;
        const places = {
            ArrowLeft: [index, layer - 1],
            ArrowRight: [index, layer + 1],
            ArrowUp: [index - 1, Math.min(layer, last(index - 1))], // a row may have run fewer blocks
            ArrowDown: [index + 1, Math.min(layer, last(index + 1))],
            Home: [index, 0],
            End: [index, last(index)],
        };
        if (!places[event.key]) return;
        event.preventDefault();
        this.at(...places[event.key])?.focus();
    }
};

// Show the ten best of a cell in `panel`: a heading and a list.
Lens.showDetails = function (panel, run, index, layer) {
    const token = run.tokens[index];
    const { ids, shares, entropy } = Lens.readout(token, layer);
    const place = layer ? `after block ${layer}` : "at the embeddings";
    const title = `Token ${index + 1}, “${run.text(token.id)}”, ${place}: `;
    panel.querySelector("p").textContent = `${title}entropy ${entropy.toFixed(2)} nats`;
    const items = ids.map((id, rank) => {
        const item = Lens.element("li");
        item.style.setProperty("--lens-share", shares[rank].toFixed(3));
        item.classList.toggle("lens-written", id === token.id);
        item.append(Lens.element("span", run.text(id)), Lens.element("span", Lens.percent(shares[rank])));
        return item;
    });
    panel.querySelector("ol").replaceChildren(...items);
};
