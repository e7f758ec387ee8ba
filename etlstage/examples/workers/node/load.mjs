/*
 * Load one message at a time, in Node without dependencies.
 *
 * Each message becomes a line of a file. As an L stage:
 * `command: [node, load.mjs, out.txt]`.
 */

import { once } from "node:events";
import { appendFileSync, fsyncSync, openSync } from "node:fs";

const target = openSync(process.argv[2], "a");

// The message is on the disk when this returns.
function load(message) {
  appendFileSync(target, Buffer.concat([message, Buffer.from("\n")]));
  fsyncSync(target);
}

// A marker comes escaped as \ooo, so that even NUL can travel in the environment.
function marker(name, fallback) {
  const byte = (_, octal) => String.fromCharCode(parseInt(octal, 8));
  const text = process.env[name] ?? fallback;
  return Buffer.from(text.replace(/\\([0-7]{3})/g, byte), "latin1");
}

const EOM = marker("ETLSTAGE_EOM", "\\012");
const EOP = marker("ETLSTAGE_EOP", "\\000");

// Stdout belongs to the protocol: console.error() only, never console.log().
let buffer = Buffer.alloc(0);
for await (const chunk of process.stdin) {
  // A chunk may end anywhere, also within a marker.
  buffer = Buffer.concat([buffer, chunk]);
  const output = [];
  let start = 0;
  for (let end; (end = buffer.indexOf(EOM, start)) >= 0; start = end + EOM.length) {
    load(buffer.subarray(start, end));
    // EOP is the receipt: the supervisor may forget the message now.
    output.push(EOP);
  }
  buffer = buffer.subarray(start);
  if (!process.stdout.write(Buffer.concat(output))) await once(process.stdout, "drain");
}
// No process.exit(): it could cut off what is still being written.
