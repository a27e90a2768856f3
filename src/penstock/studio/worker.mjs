// The planning half of penstock in a worker of the page: Python itself from pyodide/, penstock from planning.zip.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const start = async () => {
  postMessage({ status: "Python is starting in this page, which takes a few seconds the first time." });
  const python = await loadPyodide({ indexURL: new URL("pyodide/", import.meta.url).href });
  const planning = await fetch(new URL("planning.zip", import.meta.url));
  python.unpackArchive(await planning.arrayBuffer(), "zip", { extractDir: "/planning" });
  python.runPython("import sys; sys.path.insert(0, '/planning')");
  const answer = python.pyimport("penstock.studio.answers").answer_json;
  postMessage({ status: "Planned, proved and timed in this page; nothing is sent anywhere." });
  return answer;
};

const ready = start();
addEventListener("message", async ({ data: { number, text } }) => {
  const answer = await ready;
  postMessage({ number, text: answer(text) });
});
