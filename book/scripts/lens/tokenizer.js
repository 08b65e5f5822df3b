// Byte-level BPE: added tokens are cut out, a pattern cuts the rest, and in each cut the earliest merge goes first.
Lens.part(function (Lens) {
    Lens.Tokenizer = class {
        constructor({ pieces, merges, added, pattern }) {
            this.ids = new Map(pieces.map((piece, id) => [piece, id]));
            this.pieces = pieces.slice();
            for (const [id, text] of Object.entries(added)) this.pieces[id] = text;
            this.size = pieces.length;
            this.longest = this.pieces.reduce((most, piece) => Math.max(most, piece?.length || 0), 1);
            this.ranks = new Map(merges.map(([left, right, made], rank) => [this.key(left, right), [rank, made]]));
            this.added = new Map(Object.entries(added).map(([id, text]) => [text, Number(id)]));
            const quoted = [...this.added.keys()].sort((a, b) => b.length - a.length); // the longest where two begin
            const escaped = quoted.map((text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
            this.cut = new RegExp(escaped.join("|") || "(?!)", "gu");
            this.pattern = new RegExp(pattern, "gu");
        }

        key(left, right) {
            return left * this.size + right;
        }

        encode(text) {
            const found = [];
            let at = 0;
            for (const match of text.matchAll(this.cut)) {
                found.push(this.plain(text.slice(at, match.index)), [this.added.get(match[0])]);
                at = match.index + match[0].length;
            }
            return [...found, this.plain(text.slice(at))].flat();
        }

        plain(text) {
            return (text.match(this.pattern) || []).flatMap((word) => this.merged(Lens.spell(word)));
        }

        merged(characters) {
            const ids = characters.map((character) => this.ids.get(character));
            for (;;) {
                let best = Infinity;
                let place = -1;
                let made = 0;
                for (let i = 0; i + 1 < ids.length; i++) {
                    const found = this.ranks.get(this.key(ids[i], ids[i + 1]));
                    if (found && found[0] < best) [best, made, place] = [found[0], found[1], i];
                }
                if (place < 0) return ids;
                ids.splice(place, 2, made);
            }
        }
    };
});
