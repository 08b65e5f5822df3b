// The parts of the lens. What the worker needs is written as functions, whose text makes the worker: a page from
// file:// can load scripts, and nothing else.
"use strict";
var Lens = {
    shared: [],
    part(make) {
        this.shared.push(make);
        make(this);
    },
    workerSource() {
        const makes = this.shared.map((make) => `(${make})(Lens);`);
        return `"use strict";\nconst Lens = {};\n${makes.join("\n")}\nLens.serve(self);\n`;
    },
};
