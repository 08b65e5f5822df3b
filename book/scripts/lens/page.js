// The page: stored examples, the reader's own sentence, a gate, and writing with it.
"use strict";

Lens.start = function (root, stored, base) {
    const part = (name) => root.querySelector(`[data-lens=${name}]`);
    const model = new Lens.Model(base, stored.files);
    const directions = Object.fromEntries(stored.directions.map((direction) => [direction.name, direction]));
    const layers = stored.examples[0].tokens[0].ids.length - 1;
    let full = null; // the run at full depth
    let shown = null; // that, or the one with early exit
    let asked = 0; // requests so far; only the newest is shown

    const grid = new Lens.Grid(part("grid"), (index, layer) => Lens.showDetails(part("details"), shown, index, layer));
    const say = (line) => (part("status").textContent = line);
    const complain = (line) => {
        part("complaint").textContent = line;
        say("");
    };

    part("example").append(...stored.examples.map(({ source }, number) => Lens.option(number, source)));
    part("direction").append(...stored.directions.map(({ name, label }) => Lens.option(name, label)));
    const gateNames = Object.keys(Lens.gates);
    part("gate").append(...gateNames.map((name) => Lens.option(name, name.replace("_", " "))), Lens.option("", "no gate"));
    part("size").textContent = (model.bytes / 1e6).toFixed(1);

    function ruleSet() {
        const gate = part("gate").value;
        return gate ? { gate, threshold: Number(part("threshold").value) } : null;
    }

    function textOf(run, ids) {
        return Lens.textOf(ids.filter((id) => !run.ends.includes(id)).map((id) => run.pieces[id]));
    }

    function newRun(given) {
        const run = { rule: null, tokens: [], pieces: {}, ends: stored.ends, ...given };
        run.text = (id) => Lens.visible(run.pieces[id]);
        return run;
    }

    // Tokens that count: those of the text, not its end.
    const counted = (run) => run.tokens.filter(({ id }) => !run.ends.includes(id));

    function begin(run) {
        shown = run;
        if (!run.rule) full = run;
        const { label } = directions[run.direction];
        const how = run.rule ? "written with early exit" : "at full depth";
        grid.clear(layers, `“${run.source}”, ${label}, ${how}. A row per token, a column per layer.`);
        run.tokens.forEach((_, index) => grid.add(run, index));
        report();
    }

    function add(run, token) {
        run.tokens.push(token);
        Object.assign(run.pieces, token.pieces);
        if (run !== shown) return;
        grid.add(run, run.tokens.length - 1);
        report();
        if (!grid.chosen) Lens.showDetails(part("details"), run, run.tokens.length - 1, token.ids.length - 1);
    }

    // Where tokens leave, and what they say there.
    function report() {
        const rule = shown.rule || ruleSet();
        const readouts = (token) => token.ids.map((_, layer) => Lens.readout(token, layer));
        const exits = shown.tokens.map((token) => {
            if (shown.rule) return token.exit;
            return rule ? Lens.exitLayer(rule, readouts(token)) : layers;
        });
        grid.mark(shown, rule && exits);
        part("full").textContent = textOf(full, full.tokens.map(({ id }) => id));
        const ofFull = ({ direction, source }) => direction === full.direction && source === full.source;
        const { reference } = stored.examples.find(ofFull) || {};
        part("reference").textContent = reference;
        part("reference-line").hidden = !reference;
        part("early-line").hidden = !rule;
        part("restart").hidden = !rule;
        part("back").hidden = !shown.rule;
        const said = shown.tokens.map((token, index) => token.ids[exits[index]][0]);
        part("early").textContent = rule ? textOf(shown, said) : "";
        part("early-name").textContent = shown.rule ? "Written with early exit:" : "What each token says where it leaves:";
        part("summary").textContent = rule ? summary(exits) : "";
    }

    function summary(exits) {
        const tokens = counted(shown);
        if (!tokens.length) return "";
        const inText = (values) => values.filter((_, index) => tokens.includes(shown.tokens[index]));
        const sum = (values) => inText(values).reduce((total, value) => total + value, 0);
        const ran = shown.rule ? sum(shown.tokens.map((token) => token.ran)) : sum(exits);
        const mean = (sum(exits) / tokens.length).toFixed(1);
        const saved = Lens.percent(1 - ran / (layers * tokens.length));
        const same = inText(shown.tokens.map((token, index) => token.ids[exits[index]][0] === token.id));
        const agree = `${same.filter(Boolean).length} of ${same.length} say what the last layer says.`;
        const start = `Tokens leave after ${mean} of ${layers} blocks on average; ${saved} of the blocks`;
        return shown.rule ? `${start} did not run.` : `${start} need not run. ${agree}`;
    }

    function setGate() {
        const gate = Lens.gates[part("gate").value];
        part("threshold-line").hidden = !gate;
        if (!gate) return;
        Object.assign(part("threshold"), gate.range({ layers, vocabulary: stored.vocabulary }));
        part("threshold").value = gate.initial;
        part("threshold-name").textContent = gate.label;
    }

    function gateMoved() {
        part("threshold-value").textContent = part("threshold").value;
        if (shown?.rule) {
            halt();
            begin(full);
        } else if (shown) report();
    }

    function halt() {
        asked += 1;
        model.stop();
        part("progress").hidden = true;
        part("stop").hidden = true;
    }

    async function write(direction, source, rule) {
        halt();
        const mine = asked;
        complain("");
        part("stop").hidden = false;
        part("stop").scrollIntoView({ block: "nearest" });
        try {
            part("progress").hidden = model.ready;
            if (!model.ready) say("Loading the model.");
            await model.load((share) => {
                part("progress").value = share;
                if (mine === asked) say(`Loading the model: ${Math.floor(share * 10) * 10}%`);
            });
            part("load").hidden = true;
            if (mine !== asked) return;
            part("progress").hidden = true;
            say("The model reads the sentence.");
            const { before, after } = directions[direction];
            const run = newRun({ direction, source: source.trim(), rule });
            const request = { before, sentence: source, after, rule, room: stored.room };
            const done = await model.write(request, (token) => {
                if (mine !== asked) return;
                if (!run.tokens.length) begin(run);
                add(run, token);
            });
            if (mine === asked && done.refused) complain(done.refused);
            else if (mine === asked) {
                const speed = (run.tokens.length / done.seconds).toFixed(1);
                say(`${run.tokens.length} tokens, ${speed} a second, the prompt included.`);
            }
        } catch (error) {
            if (mine === asked) complain(error.message);
        } finally {
            if (mine === asked) halt();
        }
    }

    function show(number) {
        const example = stored.examples[number];
        halt();
        part("sentence").value = example.source;
        part("direction").value = example.direction;
        complain("");
        begin(newRun(example));
        Lens.showDetails(part("details"), shown, 0, layers);
    }

    part("example").addEventListener("change", () => show(part("example").value));
    for (const [name, kind] of [["sentence", "input"], ["direction", "change"]]) {
        part(name).addEventListener(kind, () => (part("example").selectedIndex = -1)); // no example any more
    }
    part("form").addEventListener("submit", (event) => {
        event.preventDefault();
        const text = part("sentence").value;
        if (text.trim()) write(part("direction").value, text, null);
        else complain("Type a sentence first.");
    });
    part("sentence").addEventListener("keydown", (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        part("form").requestSubmit();
    });
    part("gate").addEventListener("change", () => {
        setGate();
        gateMoved();
    });
    part("threshold").addEventListener("input", gateMoved);
    part("restart").addEventListener("click", () => write(full.direction, full.source, ruleSet()));
    part("back").addEventListener("click", () => begin(full));
    part("stop").addEventListener("click", () => {
        halt();
        say("Stopped.");
    });

    setGate();
    show(0);
    gateMoved();
    root.hidden = false;
    return model;
};
