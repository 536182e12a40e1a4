// Browsers do not start workers for pages from disk, and the search of this site is one. This runs it in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const start = () => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        document.body.appendChild(frame);
        const inner = frame.contentWindow;
        inner.postMessage = (data) => {
          const event = new MessageEvent("message", { data });
          this.dispatchEvent(event);
          if (this.onmessage) this.onmessage(event);
        };
        inner.importScripts = (...urls) => Promise.all(urls.map((each) => load(inner, each)));
        load(inner, url).then(() => {
          this.inner = inner;
          this.waiting.splice(0).forEach((each) => this.postMessage(each));
        });
      };
      document.body ? start() : addEventListener("DOMContentLoaded", start);
    }

    postMessage(data) {
      if (!this.inner) {
        this.waiting.push(data);
        return;
      }
      setTimeout(() => this.inner.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }

    terminate() {}
  };

  const load = (inner, url) =>
    new Promise((resolve, reject) => {
      const script = inner.document.createElement("script");
      script.src = new URL(url, location.href).href;
      script.onload = resolve;
      script.onerror = reject;
      inner.document.body.appendChild(script);
    });
}
