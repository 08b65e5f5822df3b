// The model on the page's side: a worker that is made of the parts, the scripts with its weights, requests.
"use strict";
Lens.Model = class {
    constructor(base, files) {
        Object.assign(this, { base, files, number: 0, listeners: new Map(), loading: null, ready: false });
    }

    get bytes() {
        return this.files.reduce((sum, { bytes }) => sum + bytes, 0);
    }

    // Loads once; `progress(share)` in 0..1. Where it fails, the next call tries again.
    load(progress) {
        this.loading ??= this.loadAll(progress).catch((error) => {
            this.end();
            throw error;
        });
        return this.loading;
    }

    // The worker is given up; the next request loads the model anew.
    end() {
        this.worker?.terminate();
        Object.assign(this, { worker: null, loading: null, ready: false });
    }

    async loadAll(progress) {
        if (typeof DecompressionStream === "undefined") {
            throw new Error("This browser can't unpack the model: it knows no DecompressionStream.");
        }
        const source = URL.createObjectURL(new Blob([Lens.workerSource()], { type: "text/javascript" }));
        this.worker = new Worker(source);
        let here = 0;
        for (const { name, bytes } of this.files) {
            const part = await this.script(name);
            await this.taken(part);
            here += bytes;
            progress(here / this.bytes);
        }
        this.worker.onmessage = ({ data }) => this.heard(data);
        this.worker.onerror = (event) => {
            this.end();
            this.heard({ kind: "failed", line: event.message || "The model's worker crashed." });
        };
        this.ready = true;
    }

    script(name) {
        return new Promise((resolve, reject) => {
            const tag = document.createElement("script");
            tag.src = this.base + name;
            tag.onload = () => {
                tag.remove();
                resolve(Lens.partOfModel);
                Lens.partOfModel = null;
            };
            tag.onerror = () => {
                tag.remove();
                reject(new Error(`A part of the model, ${name}, could not be loaded.`));
            };
            document.head.append(tag);
        });
    }

    taken(part) {
        return new Promise((resolve, reject) => {
            this.worker.onmessage = ({ data }) => (data.kind === "taken" ? resolve() : reject(new Error(data.line)));
            this.worker.onerror = (event) => reject(new Error(event.message || "The worker could not be started."));
            this.worker.postMessage({ kind: "part", part });
        });
    }

    // Write; `tell(token)` for each. Resolves to {refused, seconds}. A new request ends the one before.
    write(request, tell) {
        this.number += 1;
        const number = this.number;
        return new Promise((resolve, reject) => {
            if (!this.worker) throw new Error("The model is not loaded.");
            this.listeners.set(number, { tell, resolve, reject });
            this.worker.postMessage({ kind: "write", number, ...request });
        });
    }

    stop() {
        this.number += 1;
        this.worker?.postMessage({ kind: "stop", number: this.number });
    }

    heard(message) {
        if (message.kind === "failed") {
            for (const { reject } of this.listeners.values()) reject(new Error(message.line));
            this.listeners.clear();
            return;
        }
        const listener = this.listeners.get(message.number);
        if (message.kind === "token") listener.tell(message.token);
        else if (message.kind === "done") {
            this.listeners.delete(message.number);
            listener.resolve(message);
        }
    }
};
