// Gates, as eelib/exits/gates defines them: a score after each block, higher means leave.
Lens.part(function (Lens) {
    // `reaches`: a score equal to the threshold leaves. `sign`: of the threshold that a reader sets. `initial`: the
    // default of eelib. `range`: of a model with so many layers and so large a vocabulary.
    Lens.gates = {
        softmax_difference: {
            label: "the largest probability less the second is above",
            range: () => ({ min: 0, max: 1, step: 0.01 }),
            initial: 0.9,
            sign: 1,
            score: ({ shares }) => shares[0] - shares[1],
        },
        confidence: {
            label: "the largest probability is above",
            range: () => ({ min: 0, max: 1, step: 0.01 }),
            initial: 0.9,
            sign: 1,
            score: ({ shares }) => shares[0],
        },
        entropy: {
            label: "the entropy in nats is below",
            range: ({ vocabulary }) => ({ min: 0, max: Math.floor(Math.log(vocabulary) * 20) / 20, step: 0.05 }),
            initial: 0.4,
            sign: -1,
            score: ({ entropy }) => -entropy,
        },
        patience: {
            label: "a layer says the same as the one before it, this many times in a row:",
            range: ({ layers }) => ({ min: 1, max: layers - 1, step: 1 }),
            initial: 6,
            sign: 1,
            reaches: true,
            score({ ids }, memory) {
                memory.equal = ids[0] === memory.top1 ? memory.equal + 1 : 0;
                memory.top1 = ids[0];
                return memory.equal;
            },
        },
    };

    // Of one token: asked after each block in turn, says whether it leaves. `rule`: {gate, threshold}.
    Lens.asked = function ({ gate, threshold }) {
        const { score, sign, reaches } = Lens.gates[gate];
        const memory = {};
        return function (readout) {
            const found = score(readout, memory);
            return reaches ? found >= sign * threshold : found > sign * threshold;
        };
    };

    // The layer, 1..L, after which a token leaves whose readouts 0..L are known.
    Lens.exitLayer = function (rule, readouts) {
        const leaves = Lens.asked(rule);
        const last = readouts.length - 1;
        for (let layer = 1; layer < last; layer++) if (leaves(readouts[layer])) return layer;
        return last;
    };
});
