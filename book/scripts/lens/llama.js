// A llama of one sequence in plain JavaScript: one token at a time, every layer's state kept to be read.
Lens.part(function (Lens) {
    // Sums of products of rows of `weights` [rows x width] with `x` [width]; four rows at once, summed in float64.
    Lens.product = function (weights, x, out) {
        const width = x.length;
        const rows = out.length;
        let row = 0;
        for (; row + 3 < rows; row += 4) {
            let a = row * width;
            let b = a + width;
            let c = b + width;
            let d = c + width;
            let [s, t, u, v] = [0, 0, 0, 0];
            for (let i = 0; i < width; i++) {
                const value = x[i];
                s += weights[a++] * value;
                t += weights[b++] * value;
                u += weights[c++] * value;
                v += weights[d++] * value;
            }
            out[row] = s;
            out[row + 1] = t;
            out[row + 2] = u;
            out[row + 3] = v;
        }
        for (; row < rows; row++) {
            let sum = 0;
            for (let i = 0, a = row * width; i < width; i++) sum += weights[a++] * x[i];
            out[row] = sum;
        }
        return out;
    };

    Lens.normed = function (x, weight, epsilon, out) {
        let squares = 0;
        for (let i = 0; i < x.length; i++) squares += x[i] * x[i];
        const scale = 1 / Math.sqrt(squares / x.length + epsilon);
        for (let i = 0; i < x.length; i++) out[i] = x[i] * scale * weight[i];
        return out;
    };

    Lens.Network = class {
        // `shape`: see eestudy/browser/weights.py. `tensor(name)`: its numbers, rows after one another.
        constructor(shape, tensor) {
            Object.assign(this, shape);
            this.embeddings = tensor("model.embed_tokens.weight");
            this.norm = tensor("model.norm.weight");
            this.head = tensor("lm_head.weight");
            const names = {
                before: "input_layernorm",
                queries: "self_attn.q_proj",
                keys: "self_attn.k_proj",
                values: "self_attn.v_proj",
                attended: "self_attn.o_proj",
                between: "post_attention_layernorm",
                gate: "mlp.gate_proj",
                up: "mlp.up_proj",
                down: "mlp.down_proj",
            };
            const keyWidth = this.keyHeads * this.headWidth;
            this.blocks = Array.from({ length: this.layers }, (_, number) => {
                const entries = Object.entries(names);
                const block = Object.fromEntries(
                    entries.map(([key, name]) => [key, tensor(`model.layers.${number}.${name}.weight`)]),
                );
                block.cachedKeys = new Float32Array(this.window * keyWidth);
                block.cachedValues = new Float32Array(this.window * keyWidth);
                return block;
            });
            this.states = Array.from({ length: this.layers + 1 }, () => new Float32Array(this.width));
            const numbers = (count) => new Float32Array(count);
            this.scratch = {
                normed: numbers(this.width),
                queries: numbers(this.heads * this.headWidth),
                mixed: numbers(this.heads * this.headWidth),
                added: numbers(this.width),
                gate: numbers(this.inner),
                up: numbers(this.inner),
            };
            const half = this.headWidth / 2;
            this.turns = Array.from({ length: half }, (_, i) => this.theta ** (-i / half));
        }

        // Run a token at a position, all earlier ones having run. `leaves(layer, state)`, where given, is asked after
        // each block but the last; where it says so, the blocks above do not run: they get copies of the keys and
        // values of the block that was left. Returns how many blocks ran; `states[0..]` are those of the layers.
        run(token, position, leaves) {
            this.states[0].set(this.embeddings.subarray(token * this.width, (token + 1) * this.width));
            for (let number = 0; number < this.layers; number++) {
                const state = this.states[number + 1];
                state.set(this.states[number]);
                this.block(this.blocks[number], state, position);
                if (leaves && number + 1 < this.layers && leaves(number + 1, state)) {
                    this.copyUp(number, position);
                    return number + 1;
                }
            }
            return this.layers;
        }

        block(block, state, position) {
            const { normed, queries, mixed, added, gate, up } = this.scratch;
            const keyWidth = this.keyHeads * this.headWidth;
            const [from, to] = [position * keyWidth, (position + 1) * keyWidth];
            Lens.normed(state, block.before, this.epsilon, normed);
            Lens.product(block.queries, normed, queries);
            Lens.product(block.keys, normed, block.cachedKeys.subarray(from, to));
            Lens.product(block.values, normed, block.cachedValues.subarray(from, to));
            this.turn(queries, position);
            this.turn(block.cachedKeys.subarray(from, to), position);
            this.attend(block, queries, position, mixed);
            Lens.product(block.attended, mixed, added);
            for (let i = 0; i < state.length; i++) state[i] += added[i];
            Lens.normed(state, block.between, this.epsilon, normed);
            Lens.product(block.gate, normed, gate);
            Lens.product(block.up, normed, up);
            for (let i = 0; i < gate.length; i++) gate[i] *= up[i] / (1 + Math.exp(-gate[i]));
            Lens.product(block.down, gate, added);
            for (let i = 0; i < state.length; i++) state[i] += added[i];
        }

        // Rotary positions: the two halves of each head are the two coordinates.
        turn(vector, position) {
            const half = this.headWidth / 2;
            for (let i = 0; i < half; i++) {
                const [cos, sin] = [Math.cos(position * this.turns[i]), Math.sin(position * this.turns[i])];
                for (let at = i; at < vector.length; at += this.headWidth) {
                    const [x, y] = [vector[at], vector[at + half]];
                    vector[at] = x * cos - y * sin;
                    vector[at + half] = y * cos + x * sin;
                }
            }
        }

        attend(block, queries, position, out) {
            const size = this.headWidth;
            const keyWidth = this.keyHeads * size;
            const weights = new Float64Array(position + 1);
            out.fill(0);
            for (let head = 0; head < this.heads; head++) {
                const own = head * size;
                const shared = Math.floor((head * this.keyHeads) / this.heads) * size;
                let most = -Infinity;
                for (let past = 0; past <= position; past++) {
                    let sum = 0;
                    const at = past * keyWidth + shared;
                    for (let i = 0; i < size; i++) sum += queries[own + i] * block.cachedKeys[at + i];
                    weights[past] = sum / Math.sqrt(size);
                    most = Math.max(most, weights[past]);
                }
                let total = 0;
                for (let past = 0; past <= position; past++) total += weights[past] = Math.exp(weights[past] - most);
                for (let past = 0; past <= position; past++) {
                    const share = weights[past] / total;
                    const at = past * keyWidth + shared;
                    for (let i = 0; i < size; i++) out[own + i] += share * block.cachedValues[at + i];
                }
            }
        }

        copyUp(number, position) {
            const keyWidth = this.keyHeads * this.headWidth;
            const [from, to] = [position * keyWidth, (position + 1) * keyWidth];
            for (const above of this.blocks.slice(number + 1)) {
                for (const kind of ["cachedKeys", "cachedValues"]) {
                    above[kind].set(this.blocks[number][kind].subarray(from, to), from);
                }
            }
        }
    };
});
