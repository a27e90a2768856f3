/* Pages that are opened from a folder may not start workers. This stands in for one: the script of the worker runs in a
   hidden frame, and messages go to and fro by plain calls. Over http the real thing is used. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inside = new Promise((ready) => {
        const inside = frame.contentWindow;
        const answer = (data) => {
          const message = new MessageEvent("message", { data });
          this.dispatchEvent(message);
          if (this.onmessage) this.onmessage(message);
        };
        inside.postMessage = (data) => setTimeout(answer, 0, data);
        const script = inside.document.createElement("script");
        script.src = new URL(url, location.href);
        script.onload = () => ready(inside);
        inside.document.head.appendChild(script);
      });
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {}
  };
}
