/*
 * Transform one message at a time, in Node without dependencies.
 *
 * Each word of a message becomes a message of its own, so there are none, one or
 * many replies. As a T stage: `command: [node, transform.mjs]`.
 */

import { once } from "node:events";

// Messages are bytes. As latin1 each byte is one character, and none is lost; a
// worker whose messages are text says toString() and Buffer.from(text) instead.
function* transform(message) {
  for (const word of message.toString("latin1").split(/[ \t\n\v\f\r]+/)) {
    if (word) yield Buffer.from(word, "latin1");
  }
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
    for (const reply of transform(buffer.subarray(start, end))) output.push(reply, EOM);
    output.push(EOP);
  }
  buffer = buffer.subarray(start);
  // Everything is written before the next chunk is awaited, and no more is read
  // while the supervisor is slower than we are.
  if (!process.stdout.write(Buffer.concat(output))) await once(process.stdout, "drain");
}
// No process.exit(): it could cut off what is still being written.
