// What the head says of states: through the final norm, as if each layer were the last.
Lens.part(function (Lens) {
    const TOP = 10;

    // Logits of four states at once: a row of the head is read once for all of them. `states`: their first numbers,
    // then their second ones, and so on.
    function logitsOfFour(head, states, out) {
        const [p, q, r, s] = out;
        for (let row = 0, at = 0; row < p.length; row++) {
            let [t, u, v, w] = [0, 0, 0, 0];
            for (let i = 0; i < states.length; i += 4) {
                const weight = head[at++];
                t += weight * states[i];
                u += weight * states[i + 1];
                v += weight * states[i + 2];
                w += weight * states[i + 3];
            }
            p[row] = t;
            q[row] = u;
            r[row] = v;
            s[row] = w;
        }
    }

    // {ids, shares, entropy} of a row of logits: the ten most probable with their probabilities; entropy in nats.
    Lens.described = function (logits) {
        const ids = [];
        let least = -Infinity;
        for (let id = 0; id < logits.length; id++) {
            if (logits[id] <= least) continue;
            let place = ids.length;
            while (place > 0 && logits[ids[place - 1]] < logits[id]) place--;
            ids.splice(place, 0, id);
            if (ids.length > TOP) ids.pop();
            if (ids.length === TOP) least = logits[ids[TOP - 1]];
        }
        const most = logits[ids[0]];
        let total = 0;
        let weighted = 0;
        for (let id = 0; id < logits.length; id++) {
            const below = logits[id] - most;
            const share = Math.exp(below);
            total += share;
            weighted += share * below;
        }
        return {
            ids,
            shares: ids.map((id) => Math.exp(logits[id] - most) / total),
            entropy: Math.max(0, Math.log(total) - weighted / total),
        };
    };

    Lens.Reader = class {
        constructor(network) {
            this.network = network;
            this.normed = new Float32Array(network.width);
            this.four = new Float64Array(4 * network.width);
            this.logits = Array.from({ length: 4 }, () => new Float32Array(network.vocabulary));
        }

        // Readouts of some states, in their order.
        read(states) {
            const { norm, head, epsilon } = this.network;
            const found = [];
            for (let start = 0; start < states.length; start += 4) {
                const some = states.slice(start, start + 4);
                some.forEach((state, place) => {
                    Lens.normed(state, norm, epsilon, this.normed);
                    for (let i = 0; i < state.length; i++) this.four[4 * i + place] = this.normed[i];
                });
                if (some.length === 1) Lens.product(head, this.normed, this.logits[0]);
                else logitsOfFour(head, this.four, this.logits);
                some.forEach((_, place) => found.push(Lens.described(this.logits[place])));
            }
            return found;
        }
    };
});
