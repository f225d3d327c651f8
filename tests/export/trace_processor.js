// SPDX-License-Identifier: Apache-2.0
//
// Perfetto's trace processor on standard input and output: node trace_processor.js FOLDER
//
// FOLDER has Perfetto's page, of which the engine is a worker of a browser: it
// fetches its WebAssembly, and speaks TraceProcessorRpcStream over a port. Here
// it gets both from us; its bytes are piped as they are.

"use strict";
const fs = require("node:fs");
const path = require("node:path");
const vm = require("node:vm");

const folder = process.argv[2];
const node = process;

function file(url) {
  return fs.readFileSync(path.join(folder, path.basename(String(url))));
}

// Node would show the line where it happened, which here is the whole engine.
node.on("uncaughtException", (error) => {
  node.stderr.write(`${error.name}: ${error.message}\n`);
  node.exit(1);
});

globalThis.self = globalThis;
globalThis.location = { href: "http://localhost/" };
globalThis.WorkerGlobalScope = class {};
globalThis.importScripts = () => {};
globalThis.XMLHttpRequest = class {
  open(method, url) {
    this.url = url;
  }
  send() {
    this.response = file(this.url);
  }
};
console.log = console.warn = console.error;

// Emscripten's code would take us for what we are by it.
globalThis.process = undefined;
vm.runInThisContext(file("engine_bundle.js").toString(), { filename: "engine_bundle.js" });
globalThis.process = node;
// What it starts with is done by then: all of it is synchronous, or a promise.
setImmediate(serve);

function serve() {
  const { port1, port2 } = new MessageChannel();
  port2.on("message", (reply) => node.stdout.write(reply));
  self.onmessage({ data: port1 });
  node.stdin.on("data", (request) => port2.postMessage(new Uint8Array(request)));
  node.stdin.on("end", () => port2.close());
}
