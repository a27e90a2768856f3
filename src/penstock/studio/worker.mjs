// The planning half of penstock in a worker of the page. It is given all files, its own Python among them, and fetches nothing.
const unpacked = (text) => {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
};

const start = async (packed) => {
  postMessage({ status: "Python is starting in this page, which takes a few seconds the first time." });
  const files = Object.fromEntries(await Promise.all(Object.entries(packed).map(async ([name, text]) => [name, await unpacked(text)])));
  const module = (name) => import(URL.createObjectURL(new Blob([files[name]], { type: "text/javascript" })));
  globalThis.fetch = async (address) => new Response(files[String(address).split("/").pop()], { headers: { "Content-Type": "application/wasm" } });
  const [{ loadPyodide }, { default: createPyodideModule }] = [await module("pyodide.mjs"), await module("pyodide.asm.mjs")];
  const python = await loadPyodide({ indexURL: "https://in.this.page/", createPyodideModule }); // where `fetch` above finds the rest
  python.unpackArchive(files["planning.zip"], "zip", { extractDir: "/planning" });
  python.runPython("import sys; sys.path.insert(0, '/planning')");
  const answer = python.pyimport("penstock.studio.answers").answer_json;
  postMessage({ status: "Planned, proved and timed in this page; nothing is sent anywhere." });
  return answer;
};

let ready;
addEventListener("message", async ({ data: { files, number, text } }) => {
  try {
    ready ??= start(files);
    const answer = await ready;
    if (text !== undefined) postMessage({ number, text: answer(text) });
  } catch (error) {
    postMessage({ problem: `Python could not be started in this page: ${error}` });
  }
});
