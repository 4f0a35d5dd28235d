// A page opened from a folder may not start a worker, and the search runs in one.
// There, this stand-in runs the worker's script in a hidden frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.inner = frame.contentWindow;
      // The script's answers go to the page, not to the frame itself.
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inner.document.createElement("script");
      this.loaded = new Promise((resolve) => (script.onload = resolve));
      script.src = address;
      this.inner.document.head.append(script);
    }

    async postMessage(data) {
      await this.loaded;
      this.inner.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
