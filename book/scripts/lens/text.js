// A byte-level vocabulary spells each byte as one character; pieces of it become text, and text becomes pieces.
Lens.part(function (Lens) {
    const spelt = []; // by byte, as GPT-2 has it: a printable byte is itself, the others follow from U+0100
    for (let byte = 0, next = 256; byte < 256; byte++) {
        const printable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
        spelt.push(String.fromCharCode(printable ? byte : next++));
    }
    const byteOf = new Map(spelt.map((character, byte) => [character, byte]));

    Lens.spell = (text) => Array.from(new TextEncoder().encode(text), (byte) => spelt[byte]);

    // The text of pieces in a row; an added piece, which may hold real spaces, is its own text.
    Lens.textOf = function (pieces) {
        const bytes = pieces.flatMap((piece) => {
            const known = Array.from(piece, (character) => byteOf.get(character));
            return known.includes(undefined) ? Array.from(new TextEncoder().encode(piece)) : known;
        });
        return new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes));
    };

    // One piece to be looked at, as the book shows tokens elsewhere.
    const turning = /[\p{Cc}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu;
    Lens.visible = function (piece) {
        const text = Lens.textOf([piece]).replaceAll(" ", "␣").replaceAll("\n", "↵");
        const code = (c) => `U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
        return text.replace(turning, code) || "∅";
    };
});
