// Weights from base64: low bytes as they are, high bytes inflated; together bfloat16, the upper half of float32.
Lens.part(function (Lens) {
    function bytesOf(text) {
        const characters = atob(text);
        const bytes = new Uint8Array(characters.length);
        for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
        return bytes;
    }

    async function inflated(bytes) {
        const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
        return new Uint8Array(await new Response(stream).arrayBuffer());
    }

    Lens.Weights = class {
        constructor({ count, places }) {
            this.numbers = new Float32Array(count);
            this.places = places;
        }

        async put({ start, count, low, high }) {
            const bits = new Uint32Array(this.numbers.buffer, 4 * start, count);
            const [lower, upper] = [bytesOf(low), await inflated(bytesOf(high))];
            for (let i = 0; i < count; i++) bits[i] = ((upper[i] << 24) | (lower[i] << 16)) >>> 0;
        }

        tensor(name) {
            return this.numbers.subarray(...this.places[name]);
        }
    };
});
